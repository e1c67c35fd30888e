"""SE-1: a file from outside must be regular and of a stated size before any of it is read."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from megatron_ext.errors import CheckpointError, ConfigError
from megatron_ext.files import read_json, read_text


def test_a_text_up_to_its_limit(tmp_path: Path):
    path = tmp_path / "file"
    path.write_text("äb", encoding="utf-8")
    (tmp_path / "link").symlink_to(path)
    assert read_text(path, 3) == read_text(str(path), 1000) == read_text(tmp_path / "link", 3) == "äb"
    with pytest.raises(ConfigError, match=r"file: 3 bytes or more; such a file must have at most 2"):
        read_text(path, 2)


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(path))


def link_to_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def link_to_itself(path: Path) -> None:
    path.symlink_to(path)


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (Path.mkdir, "a directory; only a regular file is read"),
        (make_pipe, "a named pipe; only a regular file is read"),
        (make_socket, "a socket; only a regular file is read"),
        (link_to_device, "a device; only a regular file is read"),
        (link_to_itself, "symbolic links"),
        (lambda path: path.write_bytes(b"\xff"), "not a text file in UTF-8"),
        (lambda path: None, "No such file"),
    ],
)
def test_anything_else_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make, problem: str):
    monkeypatch.chdir(tmp_path)  # paths of sockets are short
    make(Path("x"))
    with pytest.raises(CheckpointError) as caught:
        read_text("x", 1000, CheckpointError)
    assert str(caught.value).startswith("x: ")
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_says_it_is_empty_is_read_up_to_the_limit_only():
    """Files of /proc are regular, have size zero, and can be of any length."""
    path = Path("/proc/cpuinfo")
    if not path.is_file():
        pytest.skip("there is no /proc here")
    assert path.stat().st_size == 0
    with pytest.raises(ConfigError, match="101 bytes or more; such a file must have at most 100"):
        read_text(path, 100)


def test_a_file_replaced_by_a_pipe_does_not_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A pipe that replaces the file between the check and the opening does not block."""
    pipe, regular = tmp_path / "pipe", tmp_path / "file"
    os.mkfifo(pipe)
    regular.touch()
    status = os.stat(regular)
    monkeypatch.setattr("megatron_ext.files.os.stat", lambda _: status)
    with pytest.raises(ConfigError, match="a named pipe"):
        read_text(pipe, 10)


DEEP = {
    "too deep for the decoder": '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}",
    "too deep for its readers": '{"a": ' + "[" * 40 + "]" * 40 + "}",
    "in objects": '{"a":' * 40 + "1" + "}" * 40,
}


@pytest.mark.parametrize("how", DEEP)
def test_json_that_is_nested(how: str, tmp_path: Path):
    (tmp_path / "config.json").write_text(DEEP[how])
    with pytest.raises(CheckpointError, match="nested more than 32 deep") as caught:
        read_json(tmp_path / "config.json")
    assert "\n" not in str(caught.value)
