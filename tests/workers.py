"""Workers: processes that share the tests of a run, forked once all tests are collected. A pytest plugin.

`pytest -p tests.workers --workers 3` imports and collects once, where each process of pytest-xdist would do so for
itself: 15 CPU seconds. A worker takes a run of neighbouring tests, so that few set up the same fixtures, and, before
its last one, half of the longest run that is left ("work stealing"). Tests with the mark `realtime` (tests/realtime.py)
run after all others, by themselves; a failed one is repeated once. When a worker dies, its test fails, and a new worker
runs the rest.

Forks cannot use a CUDA device. Where there is one, each worker is the same command once more, which imports and
collects for itself.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import warnings
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NoReturn

import pytest

from tests import realtime

SECONDS_TO_END = 30
"""Time that a worker has for what its tests have left, such as a thread, before it is killed."""
_CONNECTION = "PYTEST_WORKER_CONNECTION"
"""Variable for a worker that collects for itself: the descriptor on which it receives indices, and `_digest`."""
_PASSED_LATER = pytest.StashKey[list[tuple[str, str]]]()  # tests, and their first failures
Events = list[tuple[str, dict[str, Any]]]  # names of hooks and what they are called with


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--workers", type=int, default=0, metavar="N", help="run tests in N forks of this process")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.workers < 0:
        raise pytest.UsageError(f"--workers {config.option.workers} must be at least 1, or 0 for one process")


def pytest_report_header(config: pytest.Config) -> str | None:
    """Say how many processes run the tests."""
    count = config.option.workers
    return f"workers: {count}" if count else None


def _uses_cuda() -> bool:
    return "torch" in sys.modules and sys.modules["torch"].cuda.is_available()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    options = session.config.option
    if _CONNECTION in os.environ:
        descriptor, digest = os.environ.pop(_CONNECTION).split()
        assert digest == _digest(session), "this process has not collected the tests of the first one"
        _work(session, Connection(int(descriptor)), ())
        os._exit(0)  # as a fork ends: the first process reports
    if not options.workers or options.collectonly or options.usepdb or session.testsfailed:
        return None  # one process, or the report of a failed collection
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1 and not _uses_cuda():
        raise pytest.UsageError(
            f"forks would lack {threads - 1} of the threads of this process; a test file starts them when it is "
            "imported, or OPENBLAS_NUM_THREADS is not 1"
        )
    session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]  # of all workers
    alone = {index for index, item in enumerate(session.items) if realtime.is_realtime(item)}
    run = _Run(session)
    run.share([index for index in range(len(session.items)) if index not in alone], options.workers, run.publish)
    first = run.hold(sorted(alone))
    failed = [index for index, events in first.items() if _has_failed(events)]
    for index in alone.difference(failed):
        run.publish(index, first[index])
    second = run.hold(failed)
    session.config.stash[_PASSED_LATER] = [
        (session.items[index].nodeid, run.failure(first[index])) for index in failed if not _has_failed(second[index])
    ]
    for index in failed:
        run.publish(index, second[index])
    return True


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Name the tests that have passed in a second run only, and say how they failed before."""
    for nodeid, failure in config.stash.get(_PASSED_LATER, []):
        terminalreporter.write_line(f"passed the second time only: {nodeid}", yellow=True)
        terminalreporter.write_line(failure)


def _has_failed(events: Events) -> bool:
    return any(values.get("outcome") == "failed" for _, values in events)


@dataclass(eq=False)
class _Worker:
    """Process, and the indices of tests that it is to run."""

    process: BaseProcess
    connection: Connection
    waiting: deque[int]
    running: int | None = None

    def send(self) -> None:
        """Let the process run the next test, and say which comes after it: what both use is not torn down."""
        self.running = self.waiting.popleft() if self.waiting else None
        following = self.waiting[0] if self.waiting else None
        with contextlib.suppress(ConnectionError):  # if it has died, reading says so
            self.connection.send(None if self.running is None else (self.running, following))


class _Run:
    """Workers of one session."""

    def __init__(self, session: pytest.Session) -> None:
        self._session = session
        self._workers: list[_Worker] = []

    def hold(self, indices: Sequence[int]) -> dict[int, Events]:
        """Run tests one at a time and return their events, which are not published."""
        held: dict[int, Events] = {}
        self.share(indices, 1, held.__setitem__)
        return held

    def share(self, indices: Sequence[int], count: int, take: Callable[[int, Events], None]) -> None:
        """Run tests in several workers, and hand the events of each test to a function."""
        bounds = [len(indices) * number // count for number in range(count + 1)]
        try:
            for begin, end in pairwise(bounds):
                if begin < end:
                    self._start(deque(indices[begin:end]))
            while self._workers:
                ready = wait([worker.connection for worker in self._workers])
                for worker in [worker for worker in self._workers if worker.connection in ready]:
                    self._serve(worker, take)
        finally:
            for worker in self._workers:
                self._end(worker)
            self._workers.clear()

    def failure(self, events: Events) -> str:
        """Return the text of the failures among a test's events."""
        config = self._session.config
        failed = [values for _, values in events if values.get("outcome") == "failed"]
        reports = [config.hook.pytest_report_from_serializable(config=config, data=values) for values in failed]
        return "\n".join(report.longreprtext for report in reports)

    def publish(self, _: int, events: Events) -> None:
        """Call the hooks of a test's events in this process."""
        config = self._session.config
        for name, values in events:
            if name == "pytest_runtest_logreport":
                report = config.hook.pytest_report_from_serializable(config=config, data=values)
                config.hook.pytest_runtest_logreport(report=report)
            elif name == "pytest_warning_recorded":
                config.hook.pytest_warning_recorded.call_historic(kwargs=values)
            else:
                getattr(config.hook, name)(**values)
        if self._session.shouldfail:
            raise self._session.Failed(self._session.shouldfail)
        if self._session.shouldstop:
            raise self._session.Interrupted(self._session.shouldstop)

    def _start(self, waiting: deque[int]) -> None:
        ours, theirs = multiprocessing.Pipe()
        others = [ours, *(worker.connection for worker in self._workers)]
        target = _begin_anew if _uses_cuda() else _work
        process = multiprocessing.get_context("fork").Process(target=target, args=(self._session, theirs, others))
        process.start()
        theirs.close()
        worker = _Worker(process, ours, waiting)
        self._workers.append(worker)
        worker.send()

    def _serve(self, worker: _Worker, take: Callable[[int, Events], None]) -> None:
        """Take a test's events, and let its worker run the next test or end."""
        assert worker.running is not None
        try:
            index, events = worker.running, worker.connection.recv()
        except (EOFError, ConnectionError):
            self._replace(worker, take)
            return
        if len(worker.waiting) < 2:
            self._steal(worker)
        worker.send()
        if worker.running is None:
            self._workers.remove(worker)
            self._end(worker)
        take(index, events)

    def _replace(self, worker: _Worker, take: Callable[[int, Events], None]) -> None:
        """Fail the test that a dead worker was running, and start another worker for the rest."""
        assert worker.running is not None
        self._workers.remove(worker)
        self._end(worker)
        if worker.waiting:
            self._start(worker.waiting)
        config, item = self._session.config, self._session.items[worker.running]
        why = f"the process that ran this test ended with exit code {worker.process.exitcode}"
        report = pytest.TestReport(item.nodeid, item.location, {}, "failed", why, "call")
        data = config.hook.pytest_report_to_serializable(config=config, report=report)
        take(worker.running, [("pytest_runtest_logreport", data)])

    def _steal(self, worker: _Worker) -> None:
        """Take half of the tests that wait for the busiest worker; the first is announced to it, and stays."""
        busiest = max(self._workers, key=lambda one: len(one.waiting))
        if busiest is not worker:
            stolen = [busiest.waiting.pop() for _ in range(len(busiest.waiting) // 2)]
            worker.waiting.extend(reversed(stolen))

    def _end(self, worker: _Worker) -> None:
        worker.connection.close()
        worker.process.join(SECONDS_TO_END)
        if worker.process.is_alive():
            worker.process.kill()
            worker.process.join()
            warnings.warn(f"a worker was killed {SECONDS_TO_END} s after its last test", stacklevel=1)


def _begin_anew(session: pytest.Session, connection: Connection, others: Sequence[Connection]) -> NoReturn:
    """Replace this fork by a process with the command of the first one, and nothing else of it."""
    os.set_inheritable(connection.fileno(), True)
    os.environ[_CONNECTION] = f"{connection.fileno()} {_digest(session)}"
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # its header and summary
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _digest(session: pytest.Session) -> str:
    return str(zlib.crc32("\n".join(item.nodeid for item in session.items).encode()))


def _work(session: pytest.Session, connection: Connection, others: Sequence[Connection]) -> None:
    """Run the tests whose indices arrive, and send the events of each."""
    for other in others:
        other.close()  # the end of the first process ends this one
    recorder = _become_worker(session.config)
    items = session.items
    try:
        with contextlib.suppress(EOFError, ConnectionError):
            while (command := connection.recv()) is not None:
                index, following = command
                after = None if following is None else items[following]
                session.config.hook.pytest_runtest_protocol(item=items[index], nextitem=after)
                connection.send(recorder.events)
                recorder.events = []
    finally:
        session.config.pluginmanager.getplugin("runner").pytest_sessionfinish(session)  # tears down what is left


def _become_worker(config: pytest.Config) -> _Recorder:
    """Separate output and reports from those of the first process."""
    manager = config.pluginmanager
    manager.unregister(name="terminalreporter")
    manager.register(_Silent(config, open(1, "w", buffering=1, closefd=False)), "terminalreporter")  # noqa: SIM115
    capture = manager.getplugin("capturemanager")
    capture.stop_global_capturing()  # its files have one position for all forks
    capture.start_global_capturing()
    capture.suspend_global_capture(in_=True)
    recorder = _Recorder(config)
    manager.register(recorder, "worker")
    recorder.events = []  # warnings of the first process, which registering repeats
    return recorder


class _Silent(pytest.TerminalReporter):
    """Terminal of a worker, on which pytest-timeout may write the stacks of threads. Reports are not printed."""

    def pytest_runtest_logstart(self) -> None:  # type: ignore[override]
        pass

    def pytest_runtest_logreport(self) -> None:  # type: ignore[override]
        pass

    def pytest_runtest_logfinish(self) -> None:  # type: ignore[override]
        pass

    def pytest_warning_recorded(self) -> None:  # type: ignore[override]
        pass


class _Recorder:
    """Keeps the events of a worker's test."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self.events: Events = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self.events.append(("pytest_runtest_logreport", data))

    def pytest_runtest_logfinish(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        self.events.append(("pytest_runtest_logfinish", {"nodeid": nodeid, "location": location}))

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, when: str, nodeid: str, location: tuple[str, int, str] | None
    ) -> None:
        one = warning_message
        text = warnings.WarningMessage(str(one.message), one.category, one.filename, one.lineno, line=one.line)
        values = {"warning_message": text, "when": when, "nodeid": nodeid, "location": location}
        self.events.append(("pytest_warning_recorded", values))
