"""Sources of the site, from the Markdown of this tree: other addresses, other blank lines, pages made from the code.

Documents are written for readers of the repository: links lead to files of any folder, and lists and tables follow
their paragraph at once. MkDocs wants all pages below one folder and a blank line before a list.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from tools.pages import json_fields, reference

ROOT = Path(__file__).resolve().parents[2]
# Documents outside docs/, with their addresses on the site.
OTHERS = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "benchmarks/RESULTS.md": "results.md",
    "benchmarks/peers/README.md": "peers.md",
}
GENERATED: dict[str, Callable[[], str]] = {
    "reference/flags.md": reference.flags,
    "reference/json.md": json_fields.json_fields,
    "reference/metrics.md": reference.metrics,
    "reference/routes.md": reference.routes,
    "reference/python.md": reference.python,
}
ASSETS = ("site.css", "iframe-worker.js")
FENCE = re.compile(r"^ *```")
LINK = re.compile(r"(!?)\[((?:[^][]|\[[^]]*\])*)\]\(([^)\s]+)\)")
CODE = re.compile(r"(`[^`]*`)")
ITEM = re.compile(r"^(?:[-*]|\d+\.) ")


class BrokenLinkError(Exception):
    """Error for a link to a file that is not there, in one line."""


def documents() -> dict[Path, Path]:
    """Return every Markdown document, relative to the root, with its address on the site."""
    own = {path.relative_to(ROOT): path.relative_to(ROOT / "docs") for path in sorted((ROOT / "docs").rglob("*.md"))}
    return own | {Path(source): Path(address) for source, address in OTHERS.items()}


def stage(folder: Path) -> int:
    """Write all pages and pictures into a folder, which is emptied first. Return the number of pages.

    Raises:
        BrokenLinkError: A link leads to no file of the tree.
    """
    shutil.rmtree(folder, ignore_errors=True)
    pages = documents()
    texts = {address: page(source, pages) for source, address in pages.items()}
    texts |= {Path(address): make() for address, make in GENERATED.items()}
    for address, text in texts.items():
        (folder / address).parent.mkdir(parents=True, exist_ok=True)
        (folder / address).write_text(text, "utf-8")
    shutil.copytree(ROOT / "docs/images", folder / "images")
    for asset in ASSETS:
        shutil.copy(ROOT / "tools/pages" / asset, folder)
    return len(texts)


def page(source: Path, pages: dict[Path, Path]) -> str:
    """Return a document's text for the site.

    Args:
        source: Document, relative to the root.
        pages: See `documents`.
    """
    text = with_titles(source, (ROOT / source).read_text("utf-8"))
    return "\n".join(spaced(relinked(text, lambda target: site_link(source, target, pages)))) + "\n"


def with_titles(source: Path, text: str) -> str:
    """Return a document with titles of pages in place of file names that are labels of links to them."""

    def titled(found: re.Match[str]) -> str:
        file = ROOT / source.parent / found[2].partition("#")[0]
        is_named = file.is_file() and found[1].endswith(".md") and Path(found[1]).name == file.name
        heading = re.match(r"# ([^:\n]+)", file.read_text("utf-8")) if is_named else None
        return f"[{heading[1]}]({found[2]})" if heading else found[0]

    return re.sub(r"\[([^][]+)\]\(([^)\s]+)\)", titled, text)


def relinked(text: str, address: Callable[[str], str | None]) -> str:
    """Return a text with other link targets; a link whose target has no address becomes its text.

    Args:
        text: Markdown. Code keeps what looks like a link.
        address: Function from the target of a link to its address on the site.
    """

    def replaced(found: re.Match[str]) -> str:
        mark, label, target = found.groups()
        there = address(target)
        return label if there is None else f"{mark}[{label}]({there})"

    lines, is_code = [], False
    for line in text.splitlines():
        is_code ^= bool(FENCE.match(line))
        parts = CODE.split(line)
        # Labels may be code, so that a line is replaced whole unless a link stands inside of code.
        inside = any(LINK.search(part) for part in parts[1::2])
        lines.append(line if is_code or inside else LINK.sub(replaced, line))
    return "\n".join(lines)


def site_link(source: Path, target: str, pages: dict[Path, Path]) -> str | None:
    """Return the address of a link's target, relative to the page; None for files that the site lacks.

    Raises:
        BrokenLinkError: The file is not there.
    """
    if re.match(r"[a-z]+:|#", target):
        return target
    name, _, anchor = target.partition("#")
    there = Path(os.path.normpath(source.parent / name))
    if not (ROOT / there).exists():
        raise BrokenLinkError(f"{source}: {target} leads nowhere")
    if there in pages:
        address = pages[there]
    elif there.is_relative_to("docs/images"):
        address = there.relative_to("docs")
    else:
        return None
    return os.path.relpath(address, pages[source].parent) + (f"#{anchor}" if anchor else "")


def spaced(text: str) -> Iterator[str]:
    """Yield the lines with a blank one before a list or a table that follows a paragraph.

    What belongs to an item of a list is indented by four columns: by fewer, MkDocs ends the list before it.
    """
    before, is_code, width = "", False, 0  # width of the mark of the item that a line belongs to
    for line in text.splitlines():
        is_fence = bool(FENCE.match(line))
        is_code ^= is_fence
        item = None if is_code or is_fence else ITEM.match(line)
        begins_table = not is_code and line.startswith("| ") and not before.startswith("|")
        if before.strip() and ((item and not width) or begins_table):
            yield ""
        if item:
            width = len(item[0])
        elif line.strip() and not line.startswith("  "):
            width = 0
        before = line
        yield "    " + line[width:] if width and not item and line.startswith(" " * width) else line
