"""OpenMP settings beside other work: decode steps and prefill, alone and beside busy loops pinned to the same cores.

OpenMP reads its variables once, so each setting is a process of its own; all take turns in every round, in an order
that changes, and stand still (SIGSTOP) while another one computes.
"""

from __future__ import annotations

import contextlib
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

from benchmarks.cases import Figure, Run, case

SETTINGS: Mapping[str, Mapping[str, str]] = {
    "torch's default": {},
    "ours": {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "1000"},
    "PASSIVE": {"OMP_WAIT_POLICY": "PASSIVE"},
    "spin 10,000": {"GOMP_SPINCOUNT": "10000"},
    "ACTIVE": {"OMP_WAIT_POLICY": "ACTIVE"},
    "1 thread": {"OMP_NUM_THREADS": "1"},
}
VARIABLES = ("OMP_WAIT_POLICY", "OMP_NUM_THREADS", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "MKL_NUM_THREADS")
HIDDEN_1024 = {
    "hybrid_override_pattern": "M-*-M-*-",
    "hidden_size": 1024,
    "ffn_hidden_size": 4096,
    "num_attention_heads": 16,
    "max_position_embeddings": 4096,
}
MODELS: Mapping[str, Mapping[str, object]] = {"embedded": {}, "1024": HIDDEN_1024}
STEPS, PROMPT = 16, 512  # decode steps that are timed at once; tokens of a prompt
Process = subprocess.Popen  # of text


@case("throughput", quick={"rounds": 1, "names": ("ours", "1 thread"), "models": ("embedded",)})
def waiting_threads(
    run: Run,
    rounds: int = 15,
    names: tuple = tuple(SETTINGS),
    models: tuple = ("embedded",),
    conditions: tuple = ("alone", "busy"),
    rest: float = 0.0,
) -> None:
    """Decode and prefill with each OpenMP setting, idle and beside busy loops, over the first setting alone."""
    for model in models:
        times = measure(model, rounds, names, conditions, rest)
        base = times[names[0], conditions[0]]
        for name in names:
            found: dict[str, Figure] = {}
            for condition in conditions:
                for kind, taken in times[name, condition].items():
                    medians, first = (
                        [statistics.median(part) for part in zip(*one, strict=True)] for one in (taken, base[kind])
                    )
                    found |= {
                        f"{kind}, {condition}: {clock}": now / then
                        for clock, now, then in zip(("wall", "CPU"), medians, first, strict=True)
                    }
            run.row(f"{model}: {name}", found)


Times = dict[tuple[str, str], dict[str, list[tuple[float, float]]]]
"""(wall, CPU) seconds by setting and condition, and by kind of work."""


def measure(model: str, rounds: int, names: tuple[str, ...], conditions: tuple[str, ...], rest: float) -> Times:
    """Let the processes of all settings take turns; `rest` seconds between rounds are for other processes."""
    times: Times = defaultdict(lambda: defaultdict(list))
    source = random.Random(0)
    with contextlib.ExitStack() as stack:
        workers = {name: stack.enter_context(worker(model, SETTINGS[name])) for name in names}
        loops = [stack.enter_context(busy_loop(core)) for core in sorted(os.sched_getaffinity(0))]
        for _ in range(rounds):
            for condition in conditions:
                _signal(signal.SIGCONT if condition == "busy" else signal.SIGSTOP, *loops)
                for name in source.sample(names, len(names)):
                    _signal(signal.SIGCONT, workers[name])
                    for kind, measured in turn(workers[name]).items():
                        times[name, condition][kind].append(measured)
                    _signal(signal.SIGSTOP, workers[name])
                _signal(signal.SIGSTOP, *loops)
                time.sleep(rest)
    return times


@contextlib.contextmanager
def worker(model: str, variables: Mapping[str, str]) -> Iterator[Process]:
    """Start a process that computes when it gets a line; stopped until then."""
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    command = [sys.executable, "-m", "benchmarks.throughput.threads", model]
    with Process(
        command, env=environment | dict(variables), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            for _ in range(2):  # the first turn warms up
                turn(process)
            _signal(signal.SIGSTOP, process)
            yield process
        finally:
            process.kill()


def turn(process: Process) -> dict[str, tuple[float, float]]:
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
def busy_loop(core: int) -> Iterator[Process]:
    """Start a process that keeps one core busy; stopped until it is continued."""
    code = f"import os; os.sched_setaffinity(0, [{core}])\nwhile True: pass"
    with Process([sys.executable, "-S", "-c", code], text=True) as process:
        try:
            _signal(signal.SIGSTOP, process)
            yield process
        finally:
            process.kill()


def _signal(number: signal.Signals, *processes: Process) -> None:
    for process in processes:
        process.send_signal(number)


def work(model: str) -> None:
    """Answer each line of standard input with the times of a prefill and of a decode step.

    The engine steps in the main thread, as offline. In a thread of its own, as in servers, GNU's OpenMP has more
    threads than cores to count once the main thread has computed, too, and hardly spins by itself.
    """
    import torch

    from benchmarks.models import engine
    from megatron_ext.config import CacheConfig, RequestParams, SourceConfig
    from megatron_ext.mcore import platform
    from megatron_ext.models.load import load_model

    platform.initialize()
    built = engine(load_model(SourceConfig(), MODELS[model], device=torch.device("cpu")), CacheConfig())
    source = random.Random(0)

    def generate(length: int, count: int) -> tuple[float, float]:
        prompt = [source.randrange(8, 200) for _ in range(length)]
        wall, cpu = time.perf_counter(), _processor_seconds()
        built.generate([prompt], RequestParams(count, ignore_eos=True))
        return time.perf_counter() - wall, _processor_seconds() - cpu

    for _ in sys.stdin:
        prefill, decode = generate(PROMPT, 1), [seconds / STEPS for seconds in generate(1, STEPS)]
        print(json.dumps({"prefill": prefill, "decode": decode}), flush=True)


def _processor_seconds() -> float:
    """Return the CPU seconds of this process, all threads."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    work(sys.argv[1])
