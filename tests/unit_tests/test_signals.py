"""SIGINT and SIGTERM, sent to this very process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest

from megatron_ext.signals import SIGNALS, Interrupted, Interruption

INT, TERM = signal.SIGINT, signal.SIGTERM


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    return now


@pytest.fixture(autouse=True)
def handlers_are_as_before():
    before = [signal.getsignal(number) for number in SIGNALS]
    yield
    assert [signal.getsignal(number) for number in SIGNALS] == before


@pytest.mark.parametrize(("number", "code", "name"), [(INT, 130, "SIGINT"), (TERM, 143, "SIGTERM")])
def test_a_signal_raises(number, code, name):
    with pytest.raises(Interrupted, match=r"^nothing has run$") as caught, Interruption() as watched:
        os.kill(os.getpid(), number)
    assert (caught.value.exit_code, caught.value.signal_name, watched.is_asked) == (code, name, True)


def test_a_held_signal_is_noted(clock):
    with Interruption() as watched:
        watched.hold()
        signal.raise_signal(TERM)
        assert watched.number == TERM
        with pytest.raises(Interrupted, match="all are written"):
            watched.release("all are written")


def test_signals_within_a_second_are_one(clock):
    """The first one's exit code counts: torchrun sends SIGTERM after the terminal's SIGINT."""
    with Interruption() as watched:
        watched.hold()
        for number in (INT, TERM, INT, TERM):
            signal.raise_signal(number)
            clock[0] += 0.3
        assert watched.number == INT


def test_a_second_signal_does_not_disturb_cleaning_up(clock):
    done = []

    def work() -> None:
        try:
            signal.raise_signal(INT)
        finally:
            signal.raise_signal(INT)
            done.append("cleaned up")

    with pytest.raises(Interrupted), Interruption():
        work()
    assert done


@pytest.mark.parametrize("number", SIGNALS)
def test_a_later_signal_kills(number):
    """A second signal kills the (new) process at once: the code of `finally` does not run."""
    code = f"""
import signal, time
from megatron_ext.signals import Interruption
now = [0.0]
time.monotonic = lambda: now[0]
with Interruption() as watched:
    watched.hold()
    signal.raise_signal({number:d})
    now[0] = 0.9
    signal.raise_signal({number:d})
    print("alive", flush=True)
    now[0] = 1.1
    try:
        signal.raise_signal({number:d})
    finally:
        print("still alive", flush=True)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (-number, "alive\n", "")


def test_a_foreign_handler():
    """`faulthandler`, turned on by megatron-core, prints a stack in a new process, unseen by Python's handlers."""
    code = """
import faulthandler, signal
from megatron_ext.signals import Interruption
with Interruption() as watched:
    watched.hold()
    faulthandler.register(signal.SIGTERM, chain=True)
    watched.take_back()
    signal.raise_signal(signal.SIGTERM)
    print(watched.number)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "15\n", "")


def test_ignored_signals_stay_ignored():
    """Ignored signals stay ignored, as a shell ignores them for background jobs."""
    before = signal.signal(INT, signal.SIG_IGN)
    try:
        with Interruption() as watched:
            signal.raise_signal(INT)
            assert not watched.is_asked
            assert signal.getsignal(INT) is signal.SIG_IGN
    finally:
        signal.signal(INT, before)


def test_some_are_ignored():
    """MR-6: SIGINT of a terminal goes to all ranks, and is the first one's affair."""
    before = signal.getsignal(INT)
    with Interruption(ignored=(INT,)) as watched:
        signal.raise_signal(INT)
        signal.signal(INT, before)  # another library's handler
        watched.take_back()
        signal.raise_signal(INT)
        assert not watched.is_asked
        with pytest.raises(Interrupted):
            signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(INT) is before


def test_passed_on_to_the_previous_handler():
    order = []

    def work() -> None:
        with Interruption("inner", hand_on=True):
            try:
                signal.raise_signal(TERM)
            except Interrupted as interrupted:
                order.append(str(interrupted))
        order.append("not reached")

    with pytest.raises(Interrupted, match="outer"), Interruption("outer"):
        work()
    assert order == ["inner"]


def test_an_error_made_of_a_signal():
    """An error made of a signal is recognized, as torch wraps what is raised while it saves."""

    def work(watched: Interruption) -> None:
        try:
            try:
                signal.raise_signal(INT)
            except BaseException as error:
                raise RuntimeError("could not save") from error
        except RuntimeError:
            watched.raise_swallowed()

    with pytest.raises(Interrupted), Interruption() as watched:
        work(watched)
    with Interruption() as watched:
        watched.hold()
        signal.raise_signal(INT)
        watched.raise_swallowed()  # it has raised nothing, so an error has another cause


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_swallowed_signal_is_seen_at_the_next_step():
    class Swallows:
        def __del__(self) -> None:
            signal.raise_signal(INT)

    with Interruption() as watched:
        Swallows()
        with pytest.raises(Interrupted):
            watched.hold()


def test_in_another_thread_nothing_is_watched():
    found = []

    def watch() -> None:
        with Interruption() as watched:
            found.append((signal.getsignal(INT), watched.is_asked))

    before = signal.getsignal(INT)
    thread = threading.Thread(target=watch)
    thread.start()
    thread.join()
    assert found == [(before, False)]
