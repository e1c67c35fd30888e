"""SE-4: unprintable output ends no run, and texts reach standard output without control characters."""

from __future__ import annotations

import errno
import io
import os

import pytest

from megatron_ext.console.kv_cache_table import make_console
from megatron_ext.console.start import say_start
from megatron_ext.console.terminal import Output, beginning, end, printable, wrapped


class Broken(io.StringIO):
    """Fails with an error of the operating system, at once or when it is flushed."""

    def __init__(self, number: int, on_flush: bool) -> None:
        super().__init__()
        self._error = OSError(number, os.strerror(number))
        self._on_flush = on_flush

    def write(self, text: str) -> int:
        if not self._on_flush:
            raise self._error
        return len(text)

    def flush(self) -> None:
        raise self._error


@pytest.mark.parametrize("on_flush", [False, True])
def test_a_full_device_is_told_once_and_raises_nothing(on_flush):
    output = Output(Broken(errno.ENOSPC, on_flush))
    console = make_console(quiet=False, output=output)
    for _ in range(3):
        console.print("text")
    assert output.failure == "standard output could not be written: No space left on device"


def test_a_reader_that_left_is_no_failure():
    output = Output(Broken(errno.EPIPE, True))
    make_console(quiet=False, output=output).print("text")
    assert output.error is not None
    assert output.failure is None


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_unencodable_characters_are_escaped(encoding):
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding)
    Output(stream).write("ü 汉 \udce9\n")
    stream.flush()
    expected = {"ascii": rb"\xfc \u6c49 \udce9", "latin-1": b"\xfc \\u6c49 \\udce9", "utf-8": "ü 汉 \\udce9".encode()}
    assert raw.getvalue() == expected[encoding] + b"\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a \n\t b", "a b"),
        ("\x1b[31mred", r"\x1b[31mred"),
        ("\x9b\x7f\x00", r"\x9b\x7f\x00"),
        ("a\u202eb", r"a\u202eb"),
        ("\U000e0041", r"\U000e0041"),
        ("می\u200cخواهم 👩\u200d👧 é", "می\u200cخواهم 👩\u200d👧 é"),
        ("\ud800", r"\ud800"),
    ],
    ids=ascii,
)
def test_printable(text, expected):
    assert printable(text) == expected


def test_cutting_counts_columns():
    assert beginning("汉字汉字", 8) == "汉字汉字"
    assert beginning("汉字汉字汉", 8) == "汉字..."
    assert end("汉字汉字汉", 8) == "...字汉"
    assert end("x" * 9, 8) == "...xxxxx"
    assert wrapped("aa bb cc dd ee", 5, 2) == ["aa bb", "cc..."]
    assert wrapped("aa bb cc", 5, 2) == ["aa bb", "cc"]
    assert wrapped("aabbcc", 4, 3) == ["aabb", "cc"]
    assert wrapped("", 4, 3) == [""]
    assert wrapped("aa bbb cc", 5, 3) == ["aa", "bbb", "cc"], "TE-6: a word that does not fit begins the next line"


@pytest.mark.parametrize(("rank", "count"), [(None, 2), ("", 2), ("0", 2), ("1", 0)])
def test_options_without_effect_are_logged_once(rank, count, monkeypatch, caplog):
    """TE-6: the first of several ranks reports it."""
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    say_start(("--a has no effect", "--b has none"))
    assert len(caplog.messages) == count
