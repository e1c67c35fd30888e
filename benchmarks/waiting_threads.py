"""OpenMP settings beside other work: decode steps and prefill, alone and beside busy loops pinned to the same cores.

Run: `python -m benchmarks.waiting_threads [--rounds N] [--settings NAME ...]`. OpenMP reads its variables once, so each
setting is a process of its own; all take turns in every round, in an order that changes, and stand still (SIGSTOP)
while another one computes. Compare ratios of one run: each figure is a median time divided by that of the first
setting alone. CPU seconds are those of the whole process.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import resource
import signal
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping

from rich.console import Console
from rich.table import Table

SETTINGS: Mapping[str, Mapping[str, str]] = {
    "torch's default": {},
    "ours": {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "1000"},
    "PASSIVE": {"OMP_WAIT_POLICY": "PASSIVE"},
    "spin 10,000": {"GOMP_SPINCOUNT": "10000"},
    "ACTIVE": {"OMP_WAIT_POLICY": "ACTIVE"},
    "1 thread": {"OMP_NUM_THREADS": "1"},
}
VARIABLES = ("OMP_WAIT_POLICY", "OMP_NUM_THREADS", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "MKL_NUM_THREADS")
MODELS: Mapping[str, Mapping[str, object]] = {
    "embedded model": {},
    "hidden 1024": {
        "hybrid_override_pattern": "M-*-M-*-",
        "hidden_size": 1024,
        "ffn_hidden_size": 4096,
        "num_attention_heads": 16,
        "max_position_embeddings": 4096,
    },
}
STEPS, PROMPT = 16, 512  # decode steps that are timed at once; tokens of a prompt
CONDITIONS = ("alone", "busy")
Times = dict[tuple[str, str, str], list[tuple[float, float]]]
"""(wall, CPU) seconds by setting, condition and work."""


def main() -> None:
    """Measure and print a table a model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--conditions", nargs="+", choices=CONDITIONS, default=list(CONDITIONS))
    parser.add_argument("--rest", type=float, default=0.0, help="seconds between turns, for others on this machine")
    parser.add_argument("--worker", choices=MODELS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker)
        return
    for model in options.models:
        times = measure(model, options)
        Console(highlight=False, width=140).print(table_of(model, times, options))


def measure(model: str, options: argparse.Namespace) -> Times:
    """Let the processes of all settings take turns."""
    times: Times = defaultdict(list)
    source = random.Random(0)
    with contextlib.ExitStack() as stack:
        workers = {name: stack.enter_context(worker(model, SETTINGS[name])) for name in options.settings}
        loops = [stack.enter_context(busy_loop(core)) for core in sorted(os.sched_getaffinity(0))]
        for _ in range(options.rounds):
            for condition in options.conditions:
                signal_all(loops, signal.SIGCONT if condition == "busy" else signal.SIGSTOP)
                for name in source.sample(options.settings, len(options.settings)):
                    signal_all([workers[name]], signal.SIGCONT)
                    for kind, measured in turn(workers[name]).items():
                        times[name, condition, kind].append(measured)
                    signal_all([workers[name]], signal.SIGSTOP)
                signal_all(loops, signal.SIGSTOP)
                time.sleep(options.rest)
    return times


@contextlib.contextmanager
def worker(model: str, variables: Mapping[str, str]) -> Iterator[subprocess.Popen[str]]:
    """A process that computes when it is told; stopped until then."""
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    command = [sys.executable, "-m", "benchmarks.waiting_threads", "--worker", model]
    with subprocess.Popen(
        command,
        env=environment | {"PYTHONWARNINGS": "ignore"} | dict(variables),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            for _ in range(2):  # the first turn warms up
                turn(process)
            signal_all([process], signal.SIGSTOP)
            yield process
        finally:
            process.kill()


def turn(process: subprocess.Popen[str]) -> dict[str, tuple[float, float]]:
    """Take one measurement of each kind of work."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    answer = process.stdout.readline()
    if not answer:
        raise RuntimeError(f"the process of a setting has ended with exit code {process.wait()}")
    return {kind: tuple(measured) for kind, measured in json.loads(answer).items()}


@contextlib.contextmanager
def busy_loop(core: int) -> Iterator[subprocess.Popen[str]]:
    """A process that keeps one core busy; stopped until it is told."""
    code = f"import os; os.sched_setaffinity(0, [{core}])\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-S", "-c", code], text=True) as process:
        try:
            signal_all([process], signal.SIGSTOP)
            yield process
        finally:
            process.kill()


def signal_all(processes: list[subprocess.Popen[str]], number: signal.Signals) -> None:
    """Stop or continue processes."""
    for process in processes:
        process.send_signal(number)


def work(model: str) -> None:
    """Answer each line of standard input with the times of a prefill and of a decode step.

    The engine steps in the main thread, as offline. In a thread of its own, as in servers, GNU's OpenMP has more
    threads than cores to count once the main thread has computed, too, and hardly spins by itself.
    """
    import torch

    from megatron_ext.config import BatchingConfig, RequestParams, SourceConfig
    from megatron_ext.mcore.assemble import build_engine
    from megatron_ext.models.load import load_model

    loaded = load_model(SourceConfig(), MODELS[model], device=torch.device("cpu"))
    engine = build_engine(loaded.model, loaded.config, loaded.tokenizer, BatchingConfig(), dtype=loaded.dtype)
    source, ids = random.Random(0), itertools.count()

    def generate(length: int, count: int) -> tuple[float, float]:
        prompt = [source.randrange(8, 200) for _ in range(length)]
        wall, cpu = time.perf_counter(), processor_seconds()
        engine.add_request(next(ids), prompt, RequestParams(num_tokens_to_generate=count, ignore_eos=True))
        while engine.has_unfinished_requests():
            engine.step_modern()
        return time.perf_counter() - wall, processor_seconds() - cpu

    for _ in sys.stdin:
        prefill, decode = generate(PROMPT, 1), [seconds / STEPS for seconds in generate(1, STEPS)]
        print(json.dumps({"prefill": prefill, "decode": decode}), flush=True)


def processor_seconds() -> float:
    """CPU seconds of this process, all threads."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def table_of(model: str, times: Times, options: argparse.Namespace) -> Table:
    """Medians, as ratios to those of the first setting in the first condition."""
    first_setting, first_condition = options.settings[0], options.conditions[0]
    columns = [(kind, condition) for kind in ("decode", "prefill") for condition in options.conditions]
    table = Table(f"{model}: wall (CPU)", *(f"{kind}, {condition}" for kind, condition in columns))
    for name in options.settings:
        cells = []
        for kind, condition in columns:
            base = [statistics.median(part) for part in zip(*times[first_setting, first_condition, kind], strict=True)]
            here = [statistics.median(part) for part in zip(*times[name, condition, kind], strict=True)]
            wall, cpu = (now / then for now, then in zip(here, base, strict=True))
            cells.append(f"{wall:.2f} ({cpu:.2f})")
        table.add_row(name, *cells)
    first = (
        statistics.median(wall for wall, _ in times[first_setting, first_condition, kind])
        for kind in ("decode", "prefill")
    )
    table.caption = "1.00 is {:.1f} ms a decode step and {:.0f} ms of prefill".format(*(1e3 * wall for wall in first))
    return table


if __name__ == "__main__":
    main()
