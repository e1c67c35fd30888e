#!/usr/bin/env python
"""Planted mistakes: check that the tests find each one of tests/mutants/*.yaml.

A record of such a file is one mistake:

    - name: salt-on-every-block     # unique over all files
      find: |                       # exact text, once in the sources of megatron_ext, arguments and tools together
        if first:
            salt = request.salt
      replace: |
        salt = request.salt
      tests: [tests/unit_tests/kv_events/test_changes.py::test_salt]  # what should find it: files or pytest ids
      long: true                    # optional: only tests marked long find it, which `make test` leaves out
      equivalent: "reason"          # optional: no test can find it, so it is not run

`find` has no path, so that it survives a move. One trailing newline of `find` and `replace` does not count, and their
lines after the first have the indentation of the source's line on top of their own: write both without it. A part of
a line is fine too.

Mistakes are applied to a copy of the tree, one at a time, and only there are tests run: first all chosen tests without
a mistake, which must pass, then each mistake's tests. A test that fails, crashes, or runs ten times as long as
before (five minutes at least) has found it. Tests run as in `make test`, so without long ones unless the record says
`long`; a named test that is deselected is an error.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import queue
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[1]
RECORDS = Path("tests/mutants")
FOLDERS = ("megatron_ext", "arguments", "tools")
SUFFIXES = {".py", ".cpp", ".h", ".html", ".jinja"}
COMPILED = {".cpp", ".h"}
FIELDS = {"name", "find", "replace", "tests"}
OPTIONAL = {"long", "equivalent"}
LONG_TOO = ("-m", "long or not long")
QUIETLY = ("-q", "-p", "no:cacheprovider")
WARM_PYTHON = str(ROOT / "tools" / "warm_python.py")
NO_TESTS = 5  # exit code of pytest
SHORTEST_BOUND = 300.0  # seconds; below this, a busy machine looks like a test that hangs
TIMES_AS_LONG = 10
FOUND, HANGS, CRASHES = "found", "found (hangs)", "found (crashes)"
SURVIVED, ERROR, EQUIVALENT = "survived", "error", "equivalent"
WARM = (
    "hypothesis",
    "schemathesis",
    "torch._inductor.compile_fx",
    "torch.distributed.checkpoint",
    "torch.distributed.tensor",
    "transformers.modeling_utils",
    "fastapi",
    "openai.types.responses",
    "zmq",
)
"""Modules that many tests import: none of this project, where mistakes are planted, and none of megatron-core, whose
import binds functions that `mcore/platform.py` must replace first."""
COMPILE = "from megatron_ext.ops import cpp; raise SystemExit(not cpp.are_used())"


class MutantError(Exception):
    """A record, or the run as a whole, is not usable. The message is one line, or ends with the output of pytest."""


@dataclass(frozen=True)
class Mutant:
    """Planted mistake, as its record gives it.

    Attributes:
        name: Unique name over all files.
        find: Text in the sources, without the indentation of its first line.
        replace: Text in its place.
        tests: Files or ids of pytest, relative to the root of the tree.
        long: True if tests marked long run, too.
        equivalent: Reason why no test can find the mistake; empty if one should.
    """

    name: str
    find: str
    replace: str
    tests: tuple[str, ...]
    long: bool = False
    equivalent: str = ""

    @property
    def options(self) -> tuple[str, ...]:
        """Options of pytest that select the tests to run among those named."""
        return LONG_TOO if self.long else ()


@dataclass(frozen=True)
class Change:
    """File that a mutant changes, relative to the root of the tree, before and after."""

    path: Path
    before: str
    after: str

    @property
    def package(self) -> str:
        """Package of megatron_ext, or the file of megatron_ext without its suffix, or `arguments` or `tools`."""
        parts = self.path.with_suffix("").parts
        return parts[1] if parts[0] == "megatron_ext" else parts[0]


@dataclass(frozen=True)
class Outcome:
    """Result of one mutant: its state, how long its tests took in seconds, and the end of pytest's output."""

    name: str
    state: str
    seconds: float = 0.0
    detail: str = ""


def read_mutants(root: Path) -> list[Mutant]:
    """Read the records of all files, in order.

    Raises:
        MutantError: A record lacks a field, has an unknown one, or a name occurs twice.
    """
    mutants = []
    for path in sorted((root / RECORDS).glob("*.yaml")):
        for record in yaml.safe_load(path.read_text()) or []:
            is_whole = isinstance(record, dict) and set(record) - OPTIONAL == FIELDS
            if not is_whole or not (record["tests"] or record.get("equivalent")):
                raise MutantError(f"{path.name}: a record has {sorted(FIELDS)}, may have {sorted(OPTIONAL)}: {record}")
            texts = {field: record[field].removesuffix("\n") for field in ("find", "replace")}
            mutants.append(Mutant(**{**record, **texts, "tests": tuple(record["tests"])}))
    twice = [name for name, count in Counter(mutant.name for mutant in mutants).items() if count > 1]
    if twice:
        raise MutantError(f"names that occur twice: {', '.join(twice)}")
    return mutants


def read_sources(root: Path) -> dict[Path, str]:
    """Read the files that mistakes are planted in: path relative to `root` -> text."""
    paths = (path for folder in FOLDERS for path in sorted((root / folder).rglob("*")) if path.suffix in SUFFIXES)
    return {path.relative_to(root): path.read_text() for path in paths}


def locate(mutant: Mutant, sources: Mapping[Path, str]) -> Change:
    """Find the one place of a mutant's text and put its replacement there.

    Raises:
        MutantError: The text occurs nowhere or more than once, or the replacement is the same text.
    """
    places = [(path, *place) for path, text in sources.items() for place in _places(mutant.find, text)]
    if len(places) != 1:
        where = ", ".join(f"{path}:{sources[path].count(chr(10), 0, begin) + 1}" for path, begin, *_ in places)
        raise MutantError(f"{mutant.name}: its text occurs {len(places)} times, not once {where}".rstrip())
    [(path, begin, end, indent)] = places
    text = sources[path]
    after = text[:begin] + _indented(mutant.replace, indent) + text[end:]
    if after == text:
        raise MutantError(f"{mutant.name}: the replacement is the same text")
    return Change(path, text, after)


def _places(find: str, text: str) -> Iterator[tuple[int, int, str]]:
    """Yield begin, end and indentation of each occurrence."""
    first = find.split("\n", 1)[0]
    begin = text.find(first)
    while begin >= 0:
        line = text[text.rfind("\n", 0, begin) + 1 : begin]
        indent = line[: len(line) - len(line.lstrip())]
        whole = _indented(find, indent)
        if text.startswith(whole, begin):
            yield begin, begin + len(whole), indent
        begin = text.find(first, begin + len(first))


def _indented(text: str, indent: str) -> str:
    """Indent every line but the first and empty ones."""
    first, *rest = text.split("\n")
    return "\n".join([first, *(indent + line if line else line for line in rest)])


def choose(changes: Mapping[str, Change], options: argparse.Namespace) -> list[str]:
    """Choose names of mutants: by name, by package, and a sample of these.

    Raises:
        MutantError: A name or a package has no mutant.
    """
    packages = {change.package for change in changes.values()}
    for kind, given, known in (("mutant", options.names, changes), ("package with mutants", options.package, packages)):
        if unknown := [name for name in given if name not in known]:
            raise MutantError(f"there is no {kind} {', '.join(unknown)}")
    chosen = [
        name
        for name, change in changes.items()
        if (not options.names or name in options.names) and (not options.package or change.package in options.package)
    ]
    if options.sample is None or options.sample >= len(chosen):
        return chosen
    return random.Random(options.seed).sample(chosen, options.sample)


class Copy:
    """A copy of the tree in a temporary directory, where one mistake at a time is planted."""

    def __init__(self, root: Path, folder: Path) -> None:
        ignored = root / ".gitignore"
        patterns = [line.strip("/") for line in ignored.read_text().split()] if ignored.exists() else []
        shutil.copytree(root, folder, symlinks=True, ignore=shutil.ignore_patterns(".git", *patterns))
        self._folder = folder
        # Python recompiles a file when its time in seconds or its size changes; edits here are faster.
        self._times = itertools.count(int(time.time()) + 1)
        self._warm: subprocess.Popen[str] | None = None
        self._running: list[int] = []  # leaders of process groups

    def check_imports(self) -> None:
        """Make sure that a child imports this copy, and compile its operators if there are any.

        Raises:
            MutantError: The child fails, or imports another tree.
        """
        code, output = self.python("-c", "import megatron_ext; print(megatron_ext.__file__)")
        if code != 0 or Path(output.split("\n")[-2]).parents[1] != self._folder.resolve():
            raise MutantError(f"a child does not import the copy in {self._folder}:\n{output}")
        if (self._folder / "megatron_ext" / "ops" / "cpp").exists():
            self.python("-c", COMPILE)

    def run_unmodified(self, tests: Sequence[str], processes: int, options: Sequence[str] = ()) -> dict[str, float]:
        """Run tests without a mistake.

        Args:
            tests: Files, folders or ids.
            processes: Number of processes.
            options: Further options of pytest.

        Returns:
            The seconds that each file's tests took.

        Raises:
            MutantError: One fails, so that it would find every mistake, or is deselected, so that it would find none.
        """
        report = self._folder / "unmodified.xml"
        parallel = ("-p", "tests.workers", "--workers", str(processes)) if processes > 1 else ()
        code, output = self.pytest("-o", "junit_family=xunit1", f"--junitxml={report}", *parallel, *options, *tests)
        if code not in (0, NO_TESTS):
            raise MutantError(f"tests fail without a mistake (exit code {code}):\n{output}")
        seconds: defaultdict[str, float] = defaultdict(float)
        ran = []
        for case in xml.etree.ElementTree.parse(report).iter("testcase"):
            file = case.get("file", "")
            seconds[file] += float(case.get("time", "0"))
            ran.append(
                "::".join([file, *case.get("classname", "").split(".")[file.count("/") + 1 :], case.get("name", "")])
            )
        if left_out := [test for test in tests if not any(covers(test, one) for one in ran)]:
            raise MutantError(f"deselected, as by the mark long (`long: true` runs these): {', '.join(left_out)}")
        return seconds

    def try_mutant(self, mutant: Mutant, change: Change, seconds: Mapping[str, float]) -> Outcome:
        """Plant one mistake, run its tests, and take it away again."""
        expected = sum(seconds.get(file, 0.0) for file in {test.split("::")[0] for test in mutant.tests})
        with self._planted(change), tempfile.TemporaryDirectory() as cache:
            extra = {}
            if change.path.suffix in COMPILED:  # the user's cache keeps a few builds, none of them with a mistake
                extra["XDG_CACHE_HOME"] = cache
                code, output = self.python("-c", COMPILE, extra=extra)
                if code != 0:
                    return Outcome(mutant.name, ERROR, detail=f"its C++ operators are not used:\n{output}")
            started = time.monotonic()
            bound = max(SHORTEST_BOUND, TIMES_AS_LONG * expected)
            code, output = self.pytest_forked("-x", *mutant.options, *mutant.tests, timeout=bound, extra=extra)
        return Outcome(mutant.name, _state(code), time.monotonic() - started, output)

    @contextlib.contextmanager
    def _planted(self, change: Change) -> Iterator[None]:
        self._write(change.path, change.after)
        try:
            yield
        finally:
            self._write(change.path, change.before)

    def _write(self, path: Path, text: str) -> None:
        (self._folder / path).write_text(text)
        now = next(self._times)
        os.utime(self._folder / path, (now, now))

    def pytest(self, *options: str) -> tuple[int, str]:
        """Run pytest in the copy; returns its exit code and output, as `python` does."""
        return self.python("-m", "pytest", *QUIETLY, *options)

    def pytest_forked(self, *options: str, timeout: float, extra: Mapping[str, str]) -> tuple[int | None, str]:
        """Run pytest in the copy, in a fork of a process that has imported `WARM`.

        Args:
            options: Options of pytest.
            timeout: Seconds after which the process is killed.
            extra: Environment variables on top.

        Returns:
            Exit code, None if it was killed, and the output of both streams.
        """
        if self._warm is None:
            self._warm = self._start([WARM_PYTHON, *WARM], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        with tempfile.NamedTemporaryFile("r", errors="replace") as file:
            asked = {"options": [*QUIETLY, *options], "environment": dict(extra), "output": file.name}
            print(json.dumps({**asked, "timeout": timeout}), file=self._warm.stdin, flush=True)
            child = self._answer()
            self._running.append(child)
            code = self._answer()
            self._running.remove(child)
            return code, file.read()

    def _answer(self) -> Any:
        assert self._warm is not None
        assert self._warm.stdout is not None
        line = self._warm.stdout.readline()
        if not line:
            raise MutantError("the process that forks pytest has ended")
        return json.loads(line)

    def python(self, *arguments: str, extra: Mapping[str, str] | None = None) -> tuple[int, str]:
        """Run Python in the copy.

        Args:
            arguments: Arguments of the interpreter.
            extra: Environment variables on top.

        Returns:
            Exit code and the output of both streams.
        """
        with tempfile.TemporaryFile("w+", errors="replace") as file:  # a pipe would stay open in orphans of the child
            child = self._start(arguments, extra, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT)
            code = child.wait()
            _kill_group(child.pid)
            self._running.remove(child.pid)
            file.seek(0)
            return code, file.read()

    def _start(
        self, arguments: Sequence[str], extra: Mapping[str, str] | None = None, **streams: Any
    ) -> subprocess.Popen[str]:
        """Start Python in the copy, as the leader of a session."""
        left_out = ("PYTEST_", "PYTHON", "TEST_")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
        added = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        added |= {"TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": str(self._folder)}
        child = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=self._folder,
            env={**environment, **added, **(extra or {})},
            text=True,
            start_new_session=True,
            **streams,
        )
        self._running.append(child.pid)
        return child

    def stop(self) -> None:
        """End all processes that were started and still run."""
        for leader in self._running:
            _kill_group(leader)
        if self._warm is not None:
            self._warm.communicate()  # which also waits


def _kill_group(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def covers(named: str, nodeid: str) -> bool:
    """Return whether a file, a folder or an id stands for a test, given by its full id."""
    return nodeid == named or nodeid.startswith((f"{named.rstrip('/')}/", f"{named}::", f"{named}["))


def _state(code: int | None) -> str:
    """Return the state of a mutant from the exit code of its tests; None stands for a timeout."""
    if code is not None and code < 0 and code != -signal.SIGKILL:  # SIGKILL comes from outside, if memory is exhausted
        return CRASHES
    return {None: HANGS, 0: SURVIVED, 1: FOUND}.get(code, ERROR)


def run(root: Path, mutants: Sequence[Mutant], changes: Mapping[str, Change], jobs: int) -> list[Outcome]:
    """Run tests unmodified, then try every mutant, several at a time in a copy each.

    Raises:
        MutantError: The tests fail without a mistake.
    """
    outcomes = [Outcome(mutant.name, EQUIVALENT, detail=mutant.equivalent) for mutant in mutants if mutant.equivalent]
    mutants = [mutant for mutant in mutants if not mutant.equivalent]
    if not mutants:
        return outcomes
    jobs = min(jobs, len(mutants))
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, ThreadPoolExecutor(jobs) as pool:
        copies = [Copy(root, Path(folder).resolve() / str(number)) for number in range(jobs)]
        free: queue.SimpleQueue[Copy] = queue.SimpleQueue()

        def try_one(mutant: Mutant) -> Outcome:
            copy = free.get()
            try:
                return copy.try_mutant(mutant, changes[mutant.name], seconds)
            finally:
                free.put(copy)

        try:
            for copy in copies:
                copy.check_imports()
                free.put(copy)
            seconds: dict[str, float] = {}
            for options in sorted({mutant.options for mutant in mutants}):
                tests = sorted({test for mutant in mutants if mutant.options == options for test in mutant.tests})
                tqdm.write(f"tests without a mistake: {len(tests)} places {' '.join(options)}", file=sys.stderr)
                seconds |= copies[0].run_unmodified(tests, jobs, options)
            for outcome in tqdm(pool.map(try_one, mutants), total=len(mutants), unit="mutant"):
                outcomes.append(outcome)
                if outcome.state in (SURVIVED, ERROR):
                    tqdm.write(f"{outcome.name}: {outcome.state}", file=sys.stderr)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            for copy in copies:
                copy.stop()
    return outcomes


def show(outcomes: Sequence[Outcome], changes: Mapping[str, Change]) -> None:
    """Print a table, and the end of the output of each mutant that was not found."""
    width = max((len(outcome.name) for outcome in outcomes), default=0)
    for outcome in outcomes:
        reason = f"  {outcome.detail}" if outcome.state == EQUIVALENT else ""
        place = changes[outcome.name].path
        print(f"{outcome.name:{width}}  {outcome.state:15}  {outcome.seconds:5.0f} s  {place}{reason}")
    for outcome in outcomes:
        if outcome.state in (SURVIVED, ERROR):
            print(f"\n{outcome.name}: {outcome.state}\n{outcome.detail[-2000:]}")
    counts = Counter(outcome.state for outcome in outcomes)
    print("\n" + ", ".join(f"{count} {state}" for state, count in counts.items()))


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and run; the exit code is 1 if a mutant survives or cannot be run."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="mutants to try; default: all")
    parser.add_argument("--package", nargs="+", default=[], help="try only mutants of these packages of megatron_ext")
    parser.add_argument("--sample", type=int, metavar="N", help="try N mutants only, drawn by --seed")
    parser.add_argument("--seed", default="0", help="seed of the sample, any text")
    parser.add_argument("--jobs", type=int, default=2, help="number of mutants tried at a time (2)")
    parser.add_argument("--root", type=Path, default=ROOT, help="source tree (this one)")
    options = parser.parse_args(arguments)
    try:
        mutants = read_mutants(options.root)
        sources = read_sources(options.root)
        changes = {mutant.name: locate(mutant, sources) for mutant in mutants}
        chosen = choose(changes, options)
        by_name = {mutant.name: mutant for mutant in mutants}
        outcomes = run(options.root, [by_name[name] for name in chosen], changes, options.jobs)
    except MutantError as error:
        print(error, file=sys.stderr)
        return 1
    show(outcomes, changes)
    return int(any(outcome.state in (SURVIVED, ERROR) for outcome in outcomes))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # children have their own sessions, and are killed
    sys.exit(main())
