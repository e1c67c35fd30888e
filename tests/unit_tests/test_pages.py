"""Pages of the site: every document is in the navigation, and links and anchors lead somewhere."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
from collections import Counter
from pathlib import Path

import pytest

from arguments.parser import build_server_parser
from megatron_ext.commands.main import main
from tests.unit_tests.support.source import ROOT
from tools.pages import chart, figures, reference, staging
from tools.pages.attributes import Field, fields_of

CONFIG = (ROOT / "mkdocs.yml").read_text("utf-8")
FOLDERS = ("docs", "examples", "benchmarks", "megatron_ext")
DOCUMENTS = sorted(
    [*(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.md")), *ROOT.glob("*.md")],
)
HEADING = re.compile(r"^#{1,6} (.+?)\s*$")


def anchors(path: Path) -> set[str]:
    """Anchors of a document's headings, as GitHub and the site make them."""
    found: Counter[str] = Counter()
    names, is_code = set(), False
    for line in path.read_text("utf-8").splitlines():
        is_code ^= bool(staging.FENCE.match(line))
        heading = None if is_code else HEADING.match(line)
        if heading:
            text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading[1])
            slug = re.sub(r"[^\w\- ]", "", text.lower()).strip().replace(" ", "-")
            names.add(f"{slug}-{found[slug]}" if found[slug] else slug)
            found[slug] += 1
    return names


def broken(path: Path) -> list[str]:
    """Targets of a document's links that lead nowhere."""
    targets: list[str] = []
    staging.relinked(path.read_text("utf-8"), lambda target: targets.append(target) or target)
    found = []
    for target in targets:
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        there = Path(os.path.normpath(path.parent / name)) if name else path
        if not there.exists() or (anchor and there.suffix == ".md" and anchor not in anchors(there)):
            found.append(target)
    return found


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path):
    """PY-14: to a file of this tree, and to a heading of it."""
    assert broken(path) == []


def test_a_broken_link_is_seen(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# A b\n[x](#a-b) [y](#c) [z](none.md)\n```\n[code](none.md)\n```\n`[code](none.md)`\n")
    assert broken(page) == ["#c", "none.md"]


def test_every_page_is_in_the_navigation_once():
    """PY-13: MkDocs would leave a page without a place out of sight."""
    named = re.findall(r"[\w/-]+\.md", CONFIG.split("\nnav:\n")[1])
    assert sorted(named) == sorted([*map(str, staging.documents().values()), *staging.GENERATED])


# First words of pages: what can be done after reading.
VERBS = set(
    "Add Build Choose Compute Connect Control Decide Decode Find Install Keep Know Let Load Look Measure Predict Read"
    " Run Send Serve Set Start Tell Understand Watch".split()
)
OPENING = re.compile(r"\A# .+\n\n(\S+)")


@pytest.mark.parametrize("address", re.findall(r"[\w/-]+\.md", CONFIG.split("\nnav:\n")[1]))
def test_each_page_begins_with_what_can_be_done_after_it(address):
    """PY-13: the first word after the title is a verb of the reader's."""
    sources = {str(there): source for source, there in staging.documents().items()}
    if address in sources:
        text = staging.page(sources[address], staging.documents())
    else:
        text = staging.GENERATED[address]()
    first = OPENING.match(text)
    assert first is not None
    assert first[1] in VERBS


def test_nothing_is_fetched_by_readers():
    assert "font: false" in CONFIG
    assert "strict: true" in CONFIG
    for asset in staging.ASSETS:
        assert not re.search(r"https?://|@import", (ROOT / "tools/pages" / asset).read_text("utf-8"))
    assert "plugins: [offline, search]" in CONFIG
    (polyfills,) = re.findall(r"polyfills: \[(.*)\]", CONFIG)
    assert "iframe-worker" in polyfills, "the plugin offline fetches one unless it finds this name"
    assert set(polyfills.split(", ")) <= set(staging.ASSETS)


BLOCK_THAT_RUNS = re.compile(r"<!-- runnable -->\n```(\w*)\n(.*?)```", re.DOTALL)
RUNNABLE = [
    pytest.param(language, body, id=f"{path.relative_to(ROOT)}-{number}")
    for path in DOCUMENTS
    for number, (language, body) in enumerate(BLOCK_THAT_RUNS.findall(path.read_text("utf-8")))
]


@pytest.mark.parametrize(("language", "body"), RUNNABLE)
def test_blocks_that_are_marked_runnable_run(language, body, tmp_path, monkeypatch, capfd):
    """PY-14: Python as it stands there; commands by the function that the console script calls."""
    monkeypatch.chdir(tmp_path)
    if language == "python":
        exec(compile(body, "block", "exec"), {})
        return
    for line in body.splitlines():
        script, *words = shlex.split(line, comments=True)
        assert script == "megatron-ext"
        assert main(words) == 0
    assert "tokens generated" in capfd.readouterr().out


class TestFigures:
    """PY-15: pictures are what their scripts draw; the chart's figures are those of the measured table."""

    @pytest.mark.parametrize("name", figures.FIGURES)
    def test_each_is_up_to_date(self, name):
        assert (figures.FOLDER / name).read_text("utf-8") == figures.FIGURES[name]().svg()

    def test_the_table_of_the_readme_is_up_to_date(self):
        """At most six rows, in plain figures, of the run that RESULTS.md has."""
        assert "".join((chart.MARKS[0], chart.table(), chart.MARKS[1])) in (ROOT / "README.md").read_text("utf-8")
        assert len(chart.table().splitlines()) <= 8


class TestStaging:
    """PY-13: documents of this tree as pages of the site."""

    PAGES = staging.documents()

    @pytest.mark.parametrize(
        ("source", "target", "expected"),
        [
            ("README.md", "docs/server.md#errors", "server.md#errors"),
            ("docs/scale.md", "../benchmarks/RESULTS.md", "results.md"),
            ("docs/scale.md", "server.md", "server.md"),
            ("README.md", "LICENSE", None),
            ("README.md", "examples", None),
            ("docs/policies.md", "images/concepts/disk.svg", "images/concepts/disk.svg"),
            ("README.md", "#use", "#use"),
            ("README.md", "https://example.org/a.md", "https://example.org/a.md"),
        ],
    )
    def test_addresses(self, source, target, expected):
        assert staging.site_link(Path(source), target, self.PAGES) == expected

    def test_lists_and_tables_get_a_blank_line(self):
        text = "text\n- a\n- b\n  - c\nmore\n| a |\n|---|\n```\nx\n- y\n```"
        expected = "text\n\n- a\n- b\n    - c\nmore\n\n| a |\n|---|\n```\nx\n- y\n```"
        assert "\n".join(staging.spaced(text)) == expected

    def test_labels_are_titles_where_they_were_names_of_files(self):
        """Readers of the site see no files; a label that says something stays, and so does a link to a picture."""
        text = "[clients.md](clients.md#x) [a client](clients.md) [images/speed.svg](images/speed.svg) [no.md](no.md)"
        found = staging.with_titles(Path("docs/server.md"), text)
        assert found == text.replace("[clients.md]", "[Clients]")


class TestReference:
    """PY-13: reference pages have what the code has."""

    def test_flags(self):
        text = reference.flags()
        known = {option for action in build_server_parser()._actions for option in action.option_strings}
        assert [option for option in known if f"`{option}`" not in text] == []
        assert text.count("`--load-hf`") == 1, "each flag once"

    def test_help_is_no_markdown(self):
        """A list like ([0]*1+[1]*3) lost its stars, and was set in italics."""
        (row,) = [line for line in reference.flags().splitlines() if "`--moe-layer-freq`" in line]
        assert r"(\[0\]\*1+\[1\]\*3)" in row


@dataclasses.dataclass
class Sample:
    """Sample.

    Attributes:
        one: First line,
            and a second one.
    """

    one: int = 0  # not this
    two: str | None = None  # of the comment


def test_meanings_come_from_docstrings_and_comments():
    assert fields_of(Sample) == {
        "one": Field("int", "First line, and a second one."),
        "two": Field("str | None", "of the comment"),
    }
