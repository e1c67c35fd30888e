"""Phases of a start: a line for each with its seconds, and a bar on a terminal only."""

from __future__ import annotations

import contextlib
import gc
import io
import itertools
import logging
import sys

import pytest

from megatron_ext.console.start import PHASES, StartUp


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def messages(caplog):
    caplog.set_level(logging.INFO, "megatron_ext")
    return lambda: [one.getMessage() for one in caplog.records]


def test_a_line_for_each_phase(messages):
    """Each moment of the clock is a second after the last one; the start takes from the first to the last."""
    ticks = itertools.count()
    with StartUp(clock=lambda: float(next(ticks))) as start_up:
        for name in PHASES:
            with start_up.phase(name):
                pass
        start_up.ready()
        start_up.ready()
    assert messages() == [*(f"start: {name} in 1.0 s" for name in PHASES), "start: ready after 9.0 s"]


def run(fails_in: str | None) -> None:
    """Run the first two phases; fail in one of them, or between them."""
    with StartUp() as start_up:
        with start_up.phase("import"):
            pass
        if fails_in is None:
            raise ValueError("bad usage")
        with start_up.phase(fails_in):
            raise ValueError("bad usage")


@pytest.mark.parametrize(("fails_in", "said"), [(None, []), ("read", ["start: import"])])
def test_a_mistake_is_reported_without_the_line_of_its_phase(messages, fails_in, said):
    """A mistake between two phases leaves no line at all, so that its report is the only one."""
    with pytest.raises(ValueError, match="bad usage"):
        run(fails_in)
    assert [line.split(" in ")[0] for line in messages()] == said


@pytest.mark.parametrize(
    ("stream", "is_visible", "is_drawn"),
    [(Terminal, True, True), (Terminal, False, False), (io.StringIO, True, False)],
    ids=["terminal", "another rank", "file"],
)
def test_a_bar_on_a_terminal(monkeypatch, stream, is_visible, is_drawn):
    written = stream()
    monkeypatch.setattr(sys, "stderr", written)
    with StartUp(is_visible=is_visible) as start_up:
        for name in PHASES:
            with start_up.phase(name):
                pass
        start_up.ready()
    for name in PHASES:
        assert (f"start: {name}" in written.getvalue()) is is_drawn
    last = written.getvalue().rpartition("\r")
    assert last[2] == ""
    assert not last[0].split("\r")[-1].strip(), "the bar is removed"


@pytest.mark.parametrize("is_enabled", [True, False])
def test_the_garbage_collector_is_off_for_imports_only(is_enabled):
    """Also after an import that fails; a collector that was off stays so."""
    was_enabled = gc.isenabled()
    (gc.enable if is_enabled else gc.disable)()
    try:
        with StartUp(is_visible=False) as start_up:
            seen = []
            with contextlib.suppress(ImportError), start_up.importing():
                seen.append(gc.isenabled())
                raise ImportError
            assert [*seen, gc.isenabled()] == [False, is_enabled]
    finally:
        (gc.enable if was_enabled else gc.disable)()
