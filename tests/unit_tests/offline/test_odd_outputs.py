"""SE-4: a closed pipe, a full device or an ASCII terminal in the place of standard output loses no results."""

from __future__ import annotations

import errno
import io
import json
import os
import sys
from pathlib import Path

import pytest

from megatron_ext.commands.run import DONE, NOT_WRITTEN, main

TINY = """
--hybrid-override-pattern *- --hidden-size 32 --num-attention-heads 2 --tokenizer-type NullTokenizer --vocab-size 64
--inference-dynamic-batching-block-count 8 --num-tokens-to-generate 4 --prompts 1
""".split()


@pytest.fixture
def output(tmp_path) -> Path:
    return tmp_path / "out.json"


def closed_pipe() -> io.TextIOBase:
    reader, writer = os.pipe()
    os.close(reader)
    return open(writer, "w", encoding="utf-8")


def full_device() -> io.TextIOBase:
    return open("/dev/full", "w", encoding="utf-8")


@pytest.mark.parametrize(
    ("opened", "code", "error"),
    [
        (closed_pipe, DONE, ""),
        (
            full_device,
            NOT_WRITTEN,
            "megatron-ext run: error: standard output could not be written: No space left on device\n",
        ),
    ],
)
def test_the_json_is_there(opened, code, error, output, monkeypatch, capfd):
    """One line reports what was not printed; a reader that stops early is not an error."""
    with opened() as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        assert main([*TINY, "--output-path", str(output)]) == code
    assert [line for line in capfd.readouterr().err.splitlines(True) if "megatron-ext run" in line] == [error][
        : bool(error)
    ]
    assert json.loads(output.read_text())["0"]["status"] == "COMPLETED"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_terminal_that_cannot_say_everything(encoding, output, monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding=encoding))
    argv = ["--prompts", "What is 汉字?", "--num-tokens-to-generate", "2", "--output-path", str(output)]
    assert main(argv) == DONE
    sys.stdout.flush()
    assert rb"< What is \u6c49\u5b57?" in raw.getvalue()
    assert json.loads(output.read_text(encoding="utf-8"))["0"]["input_prompt"] == "What is 汉字?"


def test_results_that_cannot_be_written_are_printed(output, monkeypatch, capfd):
    """The old file stays, one line says why, and the lines of the ended requests stay too."""

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    output.write_text("old")
    monkeypatch.setattr(os, "fsync", fail)
    assert main([*TINY, "--output-path", str(output)]) == NOT_WRITTEN
    captured = capfd.readouterr()
    partial = Path(f"{output}.partial.jsonl")
    assert captured.err.splitlines()[-1] == (
        f"megatron-ext run: error: --output-path {output} could not be written: No space left on device; "
        f"{partial} has the part that could be written"
    )
    assert "1 request: 4 tokens generated" in captured.out
    assert output.read_text() == "old"
    assert json.loads(partial.read_text())["status"] == "COMPLETED"
    assert sorted(path.name for path in output.parent.iterdir()) == ["out.json", "out.json.partial.jsonl"]


def test_no_control_character_reaches_a_terminal(capfd):
    """Prompts and messages are printed without control characters."""
    assert main(["--prompts", "a\x1b[2Jb\x9b", "--num-tokens-to-generate", "2"]) == DONE
    out = capfd.readouterr().out
    assert r"a\x1b[2Jb\x9b" in out
    assert not set(out) & {"\x1b", "\x9b"}
    assert main(["--load", "no\x1b[2Jwhere"]) == 2
    assert r"--load no\x1b[2Jwhere does not exist" in capfd.readouterr().err
