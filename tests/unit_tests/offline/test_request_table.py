"""The table of prompts and answers: it fits 80 columns, and shows the first and last few of many requests."""

from __future__ import annotations

import io

import pytest
from rich.cells import cell_len
from rich.console import Console

from megatron_ext.offline.console_report import print_requests
from megatron_ext.scheduling.record import Status

FAILED = {"status": Status.FAILED, "error": "too long", "finish_reason": None, "ttft": None, "generated_tokens": ()}


def printed(records, width: int = 80, where: str | None = None) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    print_requests(records, console, where)
    return console.file.getvalue().splitlines()


def test_a_request_has_its_numbers_and_its_texts(record):
    lines = printed([record(0, skipped_prefill_token_count=4321), record(1, **FAILED)])
    assert lines[0].split() == ["id", "prompt", "skipped", "new", "ttft", "total", "ended"]
    assert lines[1].split() == ["0", "3", "4321", "2", "500", "ms", "1000", "ms", "length"]
    assert [line.strip() for line in lines[2:4]] == ["< 1 2 3", "> 7 8"]
    assert lines[4].split() == ["1", "3", "0", "0", "-", "1000", "ms", "failed"]
    assert lines[6].strip() == "! too long"


def test_texts_are_cut_where_they_share_least(record):
    """Prompts share their beginnings, so the end is shown; of what was generated, the beginning, on three lines."""
    long = record(prompt_text="begin" + 200 * "x" + "end", generated_text="first" + 900 * " word" + "last")
    lines = printed([long])
    assert lines[2].strip().startswith("< ...x")
    assert lines[2].endswith("end")
    assert lines[3].strip().startswith("> first word")
    assert len(lines) == 6
    assert lines[5].endswith("...")
    assert len("".join(lines[3:])) > 180, "what was generated is read on its lines, not in a column of eight"


TEXTS = {
    "plain": "word " * 300,
    "wide": "汉字漢字" * 300,
    "one word": "x" * 900,
    "emoji": "👩‍👩‍👧‍👦 🇩🇪 ✈️ " * 100,
    "combining": "e\u0301a\u0308" * 300,
    "controls": "\x1b[2J\x1b]0;title\x07\b\r\x9b31m\x00\x7f" * 100,
    "other lines": "a\u2028b\u2029c\x0bd\x0ce\x85f\n" * 100,
    "direction": "abc\u202edef\u2066ghi\ufeff" * 100,
    "lone halves": "\ud800 and \udce9" * 100,
    "markup": "[red]text[/red] [/] :smile: " * 100,
}


@pytest.mark.parametrize("width", [80, 60, 40, 120])
@pytest.mark.parametrize("name", TEXTS)
def test_every_line_fits_with_any_text(record, name, width):
    """No terminal control sequence reaches the table."""
    text = TEXTS[name]
    lines = printed([record(0, prompt_text=text, generated_text=text), record(1, **FAILED | {"error": text})], width)
    assert len(lines) <= 1 + 2 * 5
    for line in lines:
        assert cell_len(line) <= width, line
        assert not any(c < " " or "\x7f" <= c <= "\x9f" or "\ud800" <= c <= "\udfff" for c in line), repr(line)
        assert not set(line) & set("\u2028\u2029\u202e\u2066\ufeff")
    if name == "controls":
        assert r"< ..." in lines[2]
        assert r"> \x1b[2J\x1b]0;title\x07\x08" in lines[3]
    if name == "markup":
        assert "> [red]text[/red] [/] :smile:" in lines[3]


@pytest.mark.parametrize("count", [14, 200])
def test_of_many_the_first_and_last_are_shown(record, count):
    records = [record(i, **(FAILED if i in (7, 8) else {})) for i in range(count)]
    lines = printed(records, where="all are in out.json")
    ids = [int(line.split()[0]) for line in lines[1:] if line.split()[0].isdigit()]
    assert ids == [0, 1, 2, 3, 4, *range(count - 5, count)]
    assert [line.strip() for line in lines if "..." in line] == [
        f"... {count - 10} requests are left out here ({count - 12} completed, 2 failed)",
        "... among them failed: 7, 8",
        "... all are in out.json",
    ]
    assert len(lines) == 1 + 3 * 10 + 3
