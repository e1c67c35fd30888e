"""Durations of tests: the slowest ones and each package's tests, in CPU and wall seconds. A pytest plugin.

The tables stand at the end of a run, without `-q`. A test's time is that of its setup, call and teardown; a fixture
that several tests share counts for the first. CPU time is the test process's, with all of its threads, and that of the
child processes that were waited for in the meantime: it does not depend on what else the machine does, as wall time
does. Processes of `tests/forked.py` are children of a server; their CPU time is not counted.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from pathlib import PurePosixPath

import pytest

SLOWEST = 20
MOST_CPU_SECONDS = 400
"""CPU seconds of `make test`; a run that takes more says so."""
_PROPERTY = "duration"  # in a report's user_properties, which workers send along
_DEPTHS = {"unit_tests": 3, "functional_tests": 2}  # folders that name a package: tests/unit_tests/engine
_STARTED = pytest.StashKey["Duration"]()
_MEASURED = pytest.StashKey[dict[str, "Duration | None"]]()


@dataclass(frozen=True)
class Duration:
    """CPU and wall time, in seconds."""

    cpu: float
    wall: float

    @classmethod
    def now(cls) -> Duration:
        """Clocks of this process; two of them make the time between."""
        used = [resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return cls(sum(one.ru_utime + one.ru_stime for one in used), time.perf_counter())

    def __sub__(self, other: Duration) -> Duration:
        return Duration(self.cpu - other.cpu, self.wall - other.wall)


def total(durations: Iterable[Duration]) -> Duration:
    """Sum of several."""
    listed = list(durations)
    return Duration(sum(one.cpu for one in listed), sum(one.wall for one in listed))


def package_of(nodeid: str) -> str:
    """Folder whose tests are counted together: one below tests/unit_tests, tests/functional_tests, else the file's."""
    folders = PurePosixPath(nodeid.partition("::")[0]).parent.parts
    depth = next((_DEPTHS[name] for name in folders if name in _DEPTHS), len(folders))
    return "/".join(folders[:depth]) or "."


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, object, object]:
    item.stash[_STARTED] = Duration.now()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if call.when == "teardown":
        spent = Duration.now() - item.stash[_STARTED]
        report.user_properties.append((_PROPERTY, [spent.cpu, spent.wall]))
    return report


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_MEASURED] = {}
    config.pluginmanager.register(_Collector(config.stash[_MEASURED]), "durations-collector")


class _Collector:
    """Durations by test, from the reports of a run and of its workers."""

    def __init__(self, measured: dict[str, Duration | None]) -> None:
        self._measured = measured

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        found = [value for name, value in report.user_properties if name == _PROPERTY]
        if found:
            cpu, wall = found[-1]
            self._measured[report.nodeid] = Duration(cpu, wall)
        else:  # counted, too, if its process ends before its teardown
            self._measured.setdefault(report.nodeid, None)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    measured = config.stash[_MEASURED]
    if not measured or config.get_verbosity() < 0:
        return
    known = {nodeid: one for nodeid, one in measured.items() if one is not None}
    slowest = sorted(known.items(), key=lambda item: item[1].wall, reverse=True)[:SLOWEST]
    terminalreporter.section(f"{len(slowest)} slowest of {len(measured)} tests, by wall time")
    terminalreporter.write_line(f"{'CPU s':>9} {'wall s':>9}  test")
    for nodeid, one in slowest:
        terminalreporter.write_line(f"{one.cpu:9.2f} {one.wall:9.2f}  {nodeid}")
    terminalreporter.section("tests of each package")
    terminalreporter.write_line(f"{'tests':>7} {'CPU s':>9} {'share':>6} {'wall s':>9}  package")
    packages: dict[str, list[str]] = {}
    for nodeid in measured:
        packages.setdefault(package_of(nodeid), []).append(nodeid)
    whole = total(known.values()).cpu
    for name, nodeids in [*sorted(packages.items()), ("all", list(measured))]:
        spent = total(known[nodeid] for nodeid in nodeids if nodeid in known)
        share = spent.cpu / whole if whole else 0.0
        terminalreporter.write_line(f"{len(nodeids):7} {spent.cpu:9.2f} {share:6.1%} {spent.wall:9.2f}  {name}")
    if whole > MOST_CPU_SECONDS and not config.option.markexpr:
        terminalreporter.write_line(
            f"warning: these tests took {whole:.0f} CPU seconds; `make test` may take {MOST_CPU_SECONDS}", yellow=True
        )
