"""The documents speak of what is there: files, flags, and numbers that a run really gives."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from arguments.parser import build_parser, build_server_parser
from megatron_ext.commands.run import main
from megatron_ext.prefix_cache.cache import PrefixCache
from megatron_ext.prefix_cache.matching import Restore, ResumePoint, resume_point
from megatron_ext.scheduling.snapshots.snapshot_positions import prefill_stops
from tests.unit_tests.support.source import PACKAGE, ROOT

FILE = re.compile(r"[\w./-]*\w\.(?:py|md|txt|html|sh)\b")
FOLDER = re.compile(r"(?<![\w/.-])(?:\w+/)+(?![\w*<])")
FENCE = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
WEB = re.compile(r"https?://\S+")
BATCHING = "--inference-dynamic-batching"
GUIDES = ("README.md", "docs/running.md", "docs/prefix_caching.md", "docs/ranks.md")
TORCHRUNS = {"--nproc-per-node"}


def text_of(name: str) -> str:
    return WEB.sub("", (ROOT / name).read_text("utf-8"))


def tree(text: str) -> Iterator[Path]:
    """Every file and folder in design.md's tree, where its indentation puts it: two spaces a level, a folder a line.

    Files in a line belong to the folder that the line begins with, or else to the one that it is indented under.
    """
    block = text.split("## The tree\n```\n")[1].split("```")[0]
    folders: list[Path] = []
    for line in block.splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        del folders[depth:]
        begins_with = re.match(r" *([\w/]+/)", line)
        above = folders[-1] if folders else ROOT
        if begins_with:
            folders.append(above / begins_with[1])
        yield from (above / name for name in FOLDER.findall(line))
        for name in FILE.findall(line):
            below = (ROOT if "/" in name else folders[-1] if begins_with else above) / name
            yield below if below.exists() or not begins_with else above / name


def exists(name: str, known: set[str]) -> bool:
    """Return whether a name in running text is a path from the root, a path in the package, or a known name."""
    return (ROOT / name).exists() or (PACKAGE / name).exists() or name in known


def test_the_tree_is_there():
    places = list(tree(text_of("docs/design.md")))
    assert len(places) > 100
    assert [str(path.relative_to(ROOT)) for path in places if not path.exists()] == []


def test_files_that_are_named_are_there():
    known = {path.name for path in tree(text_of("docs/design.md"))}
    named = set()
    for name in ("docs/design.md", "CONTRIBUTING.md", "SECURITY.md", *GUIDES):
        text = text_of(name)
        if name == "docs/design.md":
            text = text.split("## The life of a request")[1]
            named |= {(name, one) for one in FOLDER.findall(text)}
        named |= {(name, one) for one in FILE.findall(FENCE.sub("", text))}
    assert len(named) > 100
    assert (
        sorted(
            (name, one)
            for name, one in named
            if not (exists(one, known) or (ROOT / name).parent.joinpath(one).exists())
        )
        == []
    )


def test_each_flag_of_the_documents_is_there():
    parsers = build_parser(), build_server_parser()
    options = {option for parser in parsers for action in parser._actions for option in action.option_strings}
    text = "".join(map(text_of, GUIDES))
    named = set(re.findall(r"(?<![\w-])--[a-z][\w-]*\w", text))
    short = re.findall(r"`(-[a-z][\w-]*)", "".join(line for line in text.splitlines(True) if line.startswith("| `-")))
    named |= {BATCHING + end for end in short if not end.startswith("--")}
    assert len(short) > 5
    assert sorted(named - options - {BATCHING, "--no"} - TORCHRUNS) == []  # two beginnings of flags


def test_the_readme_is_short():
    """PY-15: a front page: at most 110 lines, with pictures, figures beside peers, and what really ran."""
    text = (ROOT / "README.md").read_text("utf-8")
    assert len(text.splitlines()) <= 110
    assert len(re.findall(r"^!\[.+\]\(docs/images/\w+\.svg\)$", text, re.MULTILINE)) == 3
    assert "## What is missing" in text


def test_the_figure_of_the_token_axis():
    """230 tokens, blocks of 64, three of them cached, a snapshot at the end of the first."""
    states, block_hashes = PrefixCache(1, None, 2).states, [b"0", b"1", b"2"]
    slot = states.reserve(block_hashes[0])
    states.commit(block_hashes[0])
    point = resume_point(230, block_hashes, 64, states, lambda block_hash: block_hashes.index(block_hash) + 1)
    assert point == ResumePoint(64, Restore(block_hashes[0], slot))
    assert prefill_stops(230, 192, 64) == [192]


def test_the_worked_example(tmp_path):
    """The JSON output of a miss and a hit equals the example in prefix_caching.md."""
    a = list(range(1000, 1150))
    b = [*a[:140], *range(2000, 2030)]
    c, d = ([*a[:100], *range(first, first + 70)] for first in (3000, 4000))
    lines = [json.dumps({"token_ids": prompt}) for prompt in (a, b, c, d)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    output = tmp_path / "out.json"
    flags = "--drain-between-batches --batch-boundaries 0,1,2,3 --ignore-eos --num-tokens-to-generate 4"
    pools = f"{BATCHING}-block-count 32 {BATCHING}-prefix-caching-mamba-slots 8 {BATCHING}-max-requests 4"
    files = ["--prompt-file", str(tmp_path / "prompts.jsonl"), "--output-path", str(output)]
    assert main([*f"{flags} {pools} --output-format full".split(), *files]) == 0
    results = json.loads(output.read_text("utf-8"))

    example = text_of("docs/prefix_caching.md").split("## A miss, a hit")[1].split("\n## ")[0]
    rows = [row.split(" | ") for row in example.splitlines() if re.match(r"\| [a-d]: ", row)]
    for entry, (_, matched, skipped, reasons, _) in zip((results[key] for key in "0123"), rows, strict=True):
        assert entry["matched_block_count"] == int(matched)
        assert entry["skipped_prefill_token_count"] == int(skipped)
        assert entry["prefill_reasons"] == {name: int(count) for name, count in re.findall(r"`(\w+)` (\d+)", reasons)}
    for name, count in re.findall(r"`(hits|blocks_cached|snapshots_taken|slots_used)` (\d+)", example):
        assert results["prefix_cache"][name] == int(count)
    computed, skipped = map(int, re.search(r"(\d+) tokens are\s+computed and\s+(\d+) skipped", example).groups())
    totals = results["lifetime_prefill_token_count"], results["lifetime_skipped_token_count"]
    assert totals == (computed, skipped)
