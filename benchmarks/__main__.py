"""Benchmarks by question: `python -m benchmarks [NAME ...] [setting=value ...]`.

NAME is a question (standard, latency, throughput, serving, operators, baseline, routing, simulation, gpu), a case such
as latency.decode_context, or `all`; without one, `make bench`'s cases run, which a goal or the README names.
`--list` shows the cases with their settings. Each case is a process of its own; compare figures of one run only, on a
quiet machine. Exit code 1 if a case failed, or if a check (a figure that is false) or a goal that must hold did not
hold; other goals are only reported.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from benchmarks.cases import CASES, Case, Figure, Page, Rows, empty_page
from benchmarks.goals import GOALS
from benchmarks.machine import cpu_name, instruction_sets
from benchmarks.summary import MACHINE, add_floors, other_tokens, standard_table
from benchmarks.tables import table

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("torch", "triton", "numpy", "transformers", "megatron-core", "megatron-ext")
MODULES = {  # in the order in which their cases run
    "standard": ("peers.ours", "peers.transformers_script", "peers.vllm_engine", "peers.llama_cpp"),
    "latency": ("latency.prefixes", "latency.steps", "latency.restart", "latency.disk_tier"),
    "throughput": (
        "throughput.kinds",
        "throughput.speculation",
        "throughput.draft_context",
        "throughput.prediction",
        "throughput.prediction_costs",
        "throughput.ranks",
        "throughput.threads",
        "throughput.rollouts",
    ),
    "serving": ("serving.decode_share", "serving.hostile", "serving.streams", "serving.text"),
    "operators": ("operators.cpu", "operators.linear", "operators.weight_types"),
    "baseline": ("baseline.steps", "baseline.start", "baseline.traces", "baseline.chat_objects"),
    "routing": ("routing.decisions", "routing.fleet", "routing.recorded"),
    "simulation": ("simulation.host", "simulation.soak", "simulation.scale", "simulation.truth"),
    "gpu": ("gpu.models", "gpu.operators", "gpu.kept_states", "gpu.peer"),
}
GPU_MINUTES = 9.0
GRACE_SECONDS = 10.0  # beside its time, in which a case may end by itself
LEAST_SECONDS = 5.0  # with less time no process is started
# One rank needs no network; the packages' warnings about missing optional packages are known.
ENVIRONMENT = {
    "NCCL_SOCKET_IFNAME": "lo",
    "GLOO_SOCKET_IFNAME": "lo",
    "PYTHONWARNINGS": "ignore",
    "TRANSFORMERS_VERBOSITY": "error",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the named cases and print their figures, comparisons and goals.

    Returns:
        Exit code: 1 if a case failed, or a check or a necessary goal did not hold; 2 for bad usage.
    """
    options = _parser().parse_args(argv)
    names = [one for one in options.names if "=" not in one]
    settings = dict(one.split("=", 1) for one in options.names if "=" in one)
    try:
        cases = chosen(names)
        _check_settings(cases, settings)
    except ValueError as error:
        print(f"benchmarks: error: {error}", file=sys.stderr)
        return 2
    if options.list:
        print(table({one.name: _listed(one) for one in cases}))
        return 0
    if any(one.needs_cuda for one in cases) and not _use_cuda() and not options.quick:
        print("benchmarks: error: no CUDA device was found; --quick tries the script on a CPU", file=sys.stderr)
        return 2
    threads = options.threads or _threads(options.quick)
    print(header(threads))
    pages = Runner(options, settings).run(cases)
    report(pages, machine(threads))
    lost = [] if options.quick else [one for one in GOALS if one.must_hold and one.is_missed(pages)]
    return int(bool(lost) or any(page["failed"] or _failed_checks(page) for page in pages.values()))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="questions, cases, and settings such as repeats=5")
    parser.add_argument("--quick", action="store_true", help="do so little that only errors show")
    parser.add_argument("--list", action="store_true", help="show the cases and their settings")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures of all cases, as they come")
    parser.add_argument("--threads", type=int, help="threads of each case; default: 2; 1 on one core or if quick")
    parser.add_argument("--minutes", type=float, help=f"time of all cases; default: {GPU_MINUTES:g} for gpu, else none")
    return parser


def chosen(names: Sequence[str]) -> list[Case]:
    """Return the cases of these names, in the order in which they run.

    Raises:
        ValueError: A name is neither a question nor a case.
    """
    questions = {name.partition(".")[0] for name in names} - {"all"}
    for unknown in sorted(questions - set(MODULES)):
        raise ValueError(f"{unknown} is no question; choose from {', '.join(MODULES)}")
    for question in MODULES:
        if question in questions or "all" in names or not names:
            for module in MODULES[question]:
                importlib.import_module(f"benchmarks.{module}")
    for name in names:
        if "." in name and name not in CASES:
            raise ValueError(f"{name} is no case; --list shows them")
    if not names:
        return [one for one in CASES.values() if one.in_bench]
    return [
        one
        for name, one in CASES.items()
        if name in names or name.partition(".")[0] in names or ("all" in names and not one.needs_cuda)
    ]


def _check_settings(cases: Iterable[Case], settings: Mapping[str, str]) -> None:
    known: set[str] = set()
    for one in cases:
        known |= one.parse(settings).keys()
    for name in settings.keys() - known:
        raise ValueError(f"{name}={settings[name]}: none of the cases has this setting; --list shows them")


def _listed(one: Case) -> dict[str, Figure]:
    settings = " ".join(f"{name}={_shown(value)}" for name, value in one.settings.items())
    return {"measures": one.summary, "settings": settings, "make bench": "x" if one.in_bench else None}


def _shown(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _use_cuda() -> bool:
    """Return whether there is a CUDA device; operators of CPUs, which take a minute to compile, are switched off."""
    import torch

    if torch.cuda.is_available():
        os.environ.setdefault("MEGATRON_EXT_CPP", "off")
    return torch.cuda.is_available()


def _threads(quick: bool) -> int:
    return 1 if quick else min(2, len(os.sched_getaffinity(0)))  # two threads that spin are slow beside other work


def header(threads: int) -> str:
    """Return machine, versions and command: what a reader needs to judge the figures."""
    found = ", ".join(f"{package} {_version(package)}" for package in PACKAGES)
    return (
        f"machine: {machine(threads)}; {platform.machine()}, Python {platform.python_version()}, {found}\n"
        f"command: python -m benchmarks {' '.join(sys.argv[1:])}"
    )


def machine(threads: int) -> str:
    """Return the CPU, its instruction sets, and the number of threads."""
    return f"{cpu_name()} ({instruction_sets()}), {threads} of {os.cpu_count()} cores"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # a checkout on PYTHONPATH has no metadata
        return "(not installed)"


# Processes


class Runner:
    """Runner of cases, each in a process of its own.

    Args:
        options: Parsed command line.
        settings: Settings of the cases, as text.
    """

    def __init__(self, options: argparse.Namespace, settings: Mapping[str, str]) -> None:
        self._options, self._settings = options, settings
        self._threads = options.threads or _threads(options.quick)

    def run(self, cases: Sequence[Case]) -> dict[str, Page]:
        """Run the cases one after the other; each gets the time that is not reserved for later ones."""
        minutes = self._options.minutes or (GPU_MINUTES if all(one.needs_cuda for one in cases) else float("inf"))
        end = time.monotonic() + 60 * minutes
        pages: dict[str, Page] = {}
        with tempfile.TemporaryDirectory() as folder:
            for number, one in enumerate(cases):
                seconds = end - time.monotonic() - sum(later.reserved for later in cases[number + 1 :])
                print(f"[{number + 1}/{len(cases)}] {one.name}", flush=True)
                pages[one.name] = self.run_case(one, seconds, Path(folder))
                add_floors(pages)
                if self._options.json is not None:
                    found = {MACHINE: machine(self._threads), **pages}
                    self._options.json.write_text(json.dumps(found, indent=1), "utf-8")
        return pages

    def run_case(self, one: Case, seconds: float, folder: Path) -> Page:
        """Run a case to its end or until its time is over, and return its page."""
        python = os.environ.get(one.interpreter) if one.interpreter else sys.executable
        packages = os.environ.get(one.packages) if one.packages else None
        published = os.environ.get(one.published) if one.published else None
        for variable, value in ((one.interpreter, python), (one.packages, packages), (one.published, published)):
            if variable and not value:
                return {**empty_page(), "left_out": [f"all of it: {variable} is not set"]}
        if seconds < LEAST_SECONDS:
            return {**empty_page(), "left_out": ["all of it"]}
        settings = dict(self._settings)
        if one.model is not None:
            settings["model"] = str(_shared_model(folder, one.model, published, quick=self._options.quick))
        figures, size = folder / f"{one.name}.json", "quick" if self._options.quick else "full"
        command = [str(python), "-m", "benchmarks.worker", one.measure.__module__, one.name, str(figures), str(seconds)]
        command += [size, *(f"{name}={value}" for name, value in settings.items())]
        threads = str(self._threads)
        path = [*([packages] if packages else []), str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        environment = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, path))
        if one.preloads and one.preloads in os.environ:
            environment["LD_PRELOAD"] = os.environ[one.preloads]
        return run_process(command, figures, seconds, environment)


def run_process(command: Sequence[str], figures: Path, seconds: float, environment: Mapping[str, str]) -> Page:
    """Run a process that writes a page; one that fails has its page, with the reason among the failures."""
    before = Clock()
    process = subprocess.Popen(command, cwd=ROOT, env={**ENVIRONMENT, **os.environ, **environment})
    try:
        code = process.wait(None if seconds == float("inf") else seconds + GRACE_SECONDS)
        error = None if code in (0, 1) else f"ended with exit code {code}"
    except subprocess.TimeoutExpired:
        error = f"did not end in {seconds + GRACE_SECONDS:.0f} s, and was ended"
    finally:
        process.kill()
        process.wait()
    page: Page = empty_page()
    if figures.exists():
        page = json.loads(figures.read_text("utf-8"))
    else:
        error = error or "wrote no figures"
    if error is not None:
        page["failed"]["process"] = error
    page["remarks"].append(before.since())
    return page


def _shared_model(folder: Path, size: str, published: str | None, *, quick: bool) -> Path:
    """Write the model of a size that peers share, or link the files of a published one, once."""
    path = folder / f"model-{size}"
    if published is not None and not path.exists():
        path.mkdir()
        for pattern in ("model/*", "site/*/*.gguf"):
            for found in Path(published).resolve().glob(pattern):
                (path / found.name).symlink_to(found)
    elif not path.exists():
        command = [sys.executable, "-m", "benchmarks.models", str(path), size, *(["quick"] if quick else [])]
        subprocess.run(command, cwd=ROOT, env={**ENVIRONMENT, **os.environ}, check=True)
    return path


class Clock:
    """Wall time, and CPU time of the machine and of this process's children, from now on."""

    def __init__(self) -> None:
        self._wall, self._busy, self._children = time.perf_counter(), _busy_seconds(), _child_seconds()

    def since(self) -> str:
        """Return the seconds since the start, and how many cores other processes kept busy."""
        wall = time.perf_counter() - self._wall
        others = (_busy_seconds() - self._busy) - (_child_seconds() - self._children)
        return f"{wall:.0f} s; other processes used {max(0.0, others / wall):.2f} cores"


def _busy_seconds() -> float:
    """Return the CPU seconds of all cores and processes since the machine started (Linux)."""
    fields = [int(one) for one in Path("/proc/stat").read_text("utf-8").splitlines()[0].split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")  # without idle and waiting for a disk


def _child_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


# Tables


def report(pages: Mapping[str, Page], machine: str) -> None:
    """Print the figures of each case, comparisons with other cases, the standard rows, and goals."""
    for name, page in pages.items():
        _report_case(name, page)
    for name, page in pages.items():
        other = CASES[name].beside
        if other in pages and page["rows"]:
            print(f"\n## {other} beside {name}\n\n{table(beside(pages[other]['rows'], page['rows']))}")
    if any(name.startswith("standard.") for name in pages):
        print(f"\n## Standard rows\n\n{standard_table(pages, machine)}")
        print("\n".join(other_tokens(pages)))
    judged = {goal.name: goal.judge(pages) for goal in GOALS if goal.case in pages}
    if judged:
        print(f"\n## Goals\n\n{table(judged)}")


def _report_case(name: str, page: Page) -> None:
    print(f"\n## {name}\n")
    if page["rows"]:
        print(table(page["rows"]))
    for line in page["remarks"]:
        print(line)
    for part, error in page["failed"].items():
        print(f"{part} failed: {error}")
    if page["left_out"]:
        print(f"left out: {', '.join(page['left_out'])}")
    for check in _failed_checks(page):
        print(f"check failed: {check}")


def _failed_checks(page: Page) -> list[str]:
    return [f"{row}, {column}" for row, one in page["rows"].items() for column, value in one.items() if value is False]


def beside(ours: Rows, theirs: Rows) -> Rows:
    """Return the ratios of our figures to theirs, of rows and columns that both have."""
    found: Rows = {}
    for row, figures in ours.items():
        for column, value in figures.items():
            other = theirs.get(row, {}).get(column)
            if _is_number(value) and _is_number(other) and other:
                found.setdefault(row, {})[f"{column}: ours / its"] = float(value) / float(other)
    return found


def _is_number(value: Figure) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


if __name__ == "__main__":
    sys.exit(main())
