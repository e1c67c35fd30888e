"""Sockets of held slots: which are made, and which are trusted."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest

from megatron_ext.prefix_cache.disk.control import NoAnswerError, SlotControl, ask_holder
from megatron_ext.prefix_cache.disk.slot import CONTROL, SlotDirectory, take_slot
from tests.unit_tests.support.foreign import ForeignFiles


@pytest.fixture
def slot(tmp_path) -> SlotDirectory:
    directory = tmp_path / ("long" * 40)  # a path that no address of a socket has room for
    slot = take_slot(directory)
    yield slot
    slot.close()


def test_a_command_has_one_answer(slot):
    """DC-4: the socket is this user's alone, and gone when the holder closes it."""
    calls: list[str] = []
    control = SlotControl(slot, {"count": lambda: calls.append("one") or {"calls": len(calls)}})
    assert stat.S_IMODE(os.lstat(slot.path / CONTROL).st_mode) == 0o600
    assert ask_holder(slot.handle, "count") == {"calls": 1}
    assert ask_holder(slot.handle, "count") == {"calls": 2}
    with pytest.raises(NoAnswerError, match="closed the connection"):
        ask_holder(slot.handle, "another")
    assert ask_holder(slot.handle, "count") == {"calls": 3}
    control.close()
    assert not (slot.path / CONTROL).exists()
    with pytest.raises(NoAnswerError, match="does not answer"):
        ask_holder(slot.handle, "count")


def test_the_socket_of_a_killed_process_is_replaced(slot):
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(f"/proc/self/fd/{slot.handle}/{CONTROL}")
    with pytest.raises(NoAnswerError, match="refused"):
        ask_holder(slot.handle, "count")
    control = SlotControl(slot, {"count": dict})
    assert ask_holder(slot.handle, "count") == {}
    control.close()


@pytest.mark.parametrize("made", ["link", "file", "open to all", "of another user"])
def test_other_sockets_are_not_trusted(slot, monkeypatch, tmp_path, made):
    """DC-4."""
    control = SlotControl(slot, {"erase": dict})
    place = Path(slot.path / CONTROL)
    if made == "link":
        place.rename(tmp_path / "elsewhere")
        place.symlink_to(tmp_path / "elsewhere")
    elif made == "file":
        place.unlink()
        place.touch()
    elif made == "open to all":
        place.chmod(0o666)
    else:
        ForeignFiles(monkeypatch).add(place)
    with pytest.raises(NoAnswerError, match="not a socket of this user alone"):
        ask_holder(slot.handle, "erase")
    control.close()


def test_a_message_that_is_too_long_is_not_read(slot):
    control = SlotControl(slot, {"erase": dict})
    with pytest.raises(NoAnswerError):
        ask_holder(slot.handle, "erase" * 1000)
    assert ask_holder(slot.handle, "erase") == {}
    control.close()
