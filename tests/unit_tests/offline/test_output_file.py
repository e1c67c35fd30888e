"""SE-4: the JSON file is complete or absent, and only regular files are ever replaced."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import stat
from operator import attrgetter
from pathlib import Path

import pytest

from megatron_ext.config import RunConfig
from megatron_ext.errors import ConfigError, OutputError
from megatron_ext.offline.output_file import PartialResults, check_output_path, check_output_paths, write_results
from megatron_ext.offline.results import RequestEntries
from megatron_ext.scheduling.record import Status

ENTRIES = RequestEntries(attrgetter("prompt_text"), lambda tokens, **_: str(tokens))


@pytest.fixture
def target(tmp_path) -> Path:
    """Target file in a folder of its own."""
    (tmp_path / "folder").mkdir()
    return tmp_path / "folder" / "out.json"


def full_device(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_results_replace_the_file_whole(target):
    target.write_text("old")
    write_results(str(target), {"throughput": [1.0]})
    assert json.loads(target.read_text()) == {"throughput": [1.0]}
    assert list(target.parent.iterdir()) == [target]


def test_a_failed_write_leaves_the_old_file(target, monkeypatch):
    target.write_text("old")
    monkeypatch.setattr(os, "fsync", full_device)
    with pytest.raises(OutputError, match=r"^--output-path .*out\.json could not be written: No space left on device$"):
        write_results(str(target), {"throughput": [1.0]})
    assert target.read_text() == "old"
    assert list(target.parent.iterdir()) == [target]


def test_the_temporary_file_is_new(target, monkeypatch):
    """A link at its name is not followed, a file there is not overwritten."""
    monkeypatch.setattr("secrets.token_hex", lambda _: "known")
    scratch, victim = target.parent / ".results-known.part", target.parent / "victim"
    victim.write_text("mine")
    for place in (lambda: scratch.symlink_to(victim), lambda: scratch.symlink_to("nowhere"), lambda: scratch.touch()):
        place()
        with pytest.raises(OutputError, match="File exists"):
            write_results(str(target), {})
        with pytest.raises(ConfigError, match="File exists"):
            check_output_path(str(target))
        assert victim.read_text() == "mine"
        assert not (target.parent / "nowhere").exists()
        assert scratch.is_symlink() or scratch.exists(), "what others have made is not deleted"
        scratch.unlink()


def make_link(path: Path) -> None:
    (path.parent / "real").write_text("mine")
    path.symlink_to(path.parent / "real")


KINDS = {
    "a directory": Path.mkdir,
    "a symbolic link": make_link,
    "a symbolic link to nothing": lambda path: path.symlink_to(path.parent / "nowhere"),
    "a named pipe": os.mkfifo,
}


@pytest.mark.parametrize("suffix", ["", ".partial.jsonl"])
@pytest.mark.parametrize("kind", KINDS)
def test_only_regular_files_are_replaced(target, kind, suffix):
    """Other files are refused at the name of the JSON and at that of the file beside it; nothing hangs."""
    place = Path(f"{target}{suffix}")
    KINDS[kind](place)
    mode = place.lstat().st_mode
    with pytest.raises(ConfigError, match=f"{place.name} is {kind.removesuffix(' to nothing')}, and only a regular"):
        check_output_paths(RunConfig(output_path=str(target)))
    if suffix:
        PartialResults(str(target), ENTRIES).add([])
    else:
        with pytest.raises(OutputError, match="has become"):
            write_results(str(target), {})
    assert place.lstat().st_mode == mode
    assert not list(target.parent.glob(".results*"))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (".", "is not a file name; give one"),
        ("missing/out.json", "the folder .*missing does not exist; create it first"),
        ("file/out.json", "the folder .*file is no folder"),
        ("n" * 250, "cannot be written: File name too long"),
    ],
    ids=lambda value: value[:20],
)
def test_impossible_paths_are_refused_at_the_start(tmp_path, monkeypatch, path, message):
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        check_output_paths(RunConfig(output_path=path))
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_the_path_of_the_runs_counts_is_checked(tmp_path):
    """Default path beside the requests, another path, none, and the path of the requests, which is refused."""
    (tmp_path / "out.run.json").mkdir()
    (tmp_path / "counts").mkdir()
    beside = RunConfig(output_path=str(tmp_path / "out.json"))
    with pytest.raises(ConfigError, match=r"^--run-output-path .*out\.run\.json is a directory"):
        check_output_paths(beside)
    with pytest.raises(ConfigError, match=r"^--run-output-path .*counts: .* is a directory"):
        check_output_paths(dataclasses.replace(beside, run_output_path=str(tmp_path / "counts")))
    check_output_paths(dataclasses.replace(beside, run_output_path=""))
    check_output_paths(dataclasses.replace(beside, output_format="full"))
    with pytest.raises(ConfigError, match=r"--run-output-path .*out\.json is the file of --output-path"):
        dataclasses.replace(beside, run_output_path=beside.output_path)


def test_a_folder_that_takes_nothing_is_found_before_anything_runs(target, monkeypatch):
    """The check writes a file, since root may write anywhere except on a read-only file system."""

    def read_only(*_: object) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "open", read_only)
    with pytest.raises(ConfigError, match="its folder is not writable: Read-only file system"):
        check_output_path(str(target))


def test_the_permissions_of_the_file_stay(target):
    target.touch(0o600)
    target.chmod(0o600)
    partial = PartialResults(str(target), ENTRIES)
    write_results(str(target), {})
    assert stat.S_IMODE(target.stat().st_mode) == stat.S_IMODE(partial.path.stat().st_mode) == 0o600


class TestPartial:
    """Ended requests are on disk as they end."""

    def lines(self, target: Path) -> list[dict]:
        return [json.loads(line) for line in Path(f"{target}.partial.jsonl").read_text().splitlines()]

    def test_a_line_a_request_at_once(self, target, record):
        partial = PartialResults(str(target), dataclasses.replace(ENTRIES, with_events=True))
        partial.add([record(3), record(1, status=Status.ABORTED, ttft=None)])
        assert [line["request_id"] for line in self.lines(target)] == [3, 1]
        partial.add([record(2, prompt_text="a\nb\udce9")])
        lines = self.lines(target)
        assert lines[2]["input_prompt"] == "a\nb\udce9"
        assert [event["type"] for event in lines[0]["events"]] == ["ADD_ENGINE", "FINISH"]
        assert (lines[1]["status"], lines[1]["ttft"]) == ("ABORTED", None)
        partial.remove()
        assert list(target.parent.iterdir()) == []

    def test_an_old_one_is_overwritten_and_that_is_said_once(self, target, record, caplog):
        Path(f"{target}.partial.jsonl").write_text("old\n" * 9)
        PartialResults(str(target), ENTRIES).add([record(0)])
        assert [line["request_id"] for line in self.lines(target)] == [0]
        (message,) = caplog.messages
        assert message.endswith("out.json.partial.jsonl, left by an interrupted run, is overwritten")

    def test_files_of_another_run_stay(self, target, record):
        mine = PartialResults(str(target), ENTRIES)
        PartialResults(str(target), ENTRIES).add([record(7)])
        mine.add([record(0)])
        mine.remove()
        assert [line["request_id"] for line in self.lines(target)] == [7]

    def test_it_ends_no_run(self, target, record, caplog, monkeypatch):
        partial = PartialResults(str(target), ENTRIES)
        partial.add([record(0)])
        monkeypatch.setattr(RequestEntries, "entry", full_device)
        for _ in range(3):
            partial.add([record(1)])
        (message,) = caplog.messages
        assert "cannot be written, so a crash would lose the finished requests: No space left on device" in message
        assert [line["request_id"] for line in self.lines(target)] == [0]
        partial.remove()
        assert list(target.parent.iterdir()) == []
