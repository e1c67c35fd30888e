"""Command `simulate`: recorded requests through the scheduler and its prefix cache in simulated time, without a model.

It prints a row for each memory, eviction policy and schedule policy: tokens skipped, and times to the first token. The
requests come from a file (`--trace`), or from the recent past of a running server (`--server`), with its model and
settings.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import track
from rich.table import Table

from arguments.removed import refuse_removed_words
from megatron_ext.config import EvictionPolicyName
from megatron_ext.config.batching import DEFAULT_OVERTAKE_TOKENS, SchedulePolicy
from megatron_ext.config.costs import EntryCosts
from megatron_ext.console.terminal import report_error
from megatron_ext.errors import ConfigError
from megatron_ext.files import read_text
from megatron_ext.http_client import opened
from megatron_ext.simulation.formats import read_requests, read_trace
from megatron_ext.simulation.replay import simulate
from megatron_ext.simulation.settings import GIB, MODELS, Machine, Settings, limits_of
from megatron_ext.simulation.trace import Turn, describe

PROGRAM = "megatron-ext simulate"
DONE = 0
POLICIES = [policy.value for policy in EvictionPolicyName]
MEMORIES = (0.5, 1.0, 2.0)  # times the server's, or `MEMORY_GIB`
MEMORY_GIB = 8.0
PERCENTILES = (50, 90, 95, 99)
_WIDTH = 140  # columns of a table in a file
_LONGEST_KEY = 4096  # bytes
TIMEOUT = 60.0  # seconds
LONGEST_ANSWER = 2**28  # bytes
Value = TypeVar("Value")
Number = TypeVar("Number", int, float)
Figures = dict[str, float | str | None]


@dataclass(frozen=True)
class Workload:
    """Requests, and what serves them: costs of a model, and settings of an engine."""

    turns: list[Turn]
    costs: EntryCosts
    settings: Settings


def ask_server(url: str, key: str | None, max_requests: int | None = None) -> Workload:
    """Fetch trace, costs and settings from a server.

    Args:
        url: URL of the server, without a path.
        key: Key of an administrator; None for a server without keys.

    Raises:
        ConfigError: The server does not answer, refuses, has no cache, or has served nothing yet.
    """
    ask = partial(opened, url, key=key, flag="--server", timeout=TIMEOUT)
    with ask("/prefix_cache") as answer:
        state = json.loads(answer.read(LONGEST_ANSWER))
        if state["settings"]["policy"] is None:
            raise ConfigError(f"{url}: this server caches nothing; start it without --no-...-enable-prefix-caching")
        costs, settings = _described(state)
    with ask("/prefix_cache/trace") as answer:
        turns = read_requests(answer, f"{url}/prefix_cache/trace", max_requests)
    return Workload(turns, costs, settings)


def _described(state: Mapping[str, Any]) -> tuple[EntryCosts, Settings]:
    """Return the costs and the settings of a server, from its `/prefix_cache`."""
    costs, geometry, given = EntryCosts(**state["costs"]), state["geometry"], state["settings"]
    of_states = (geometry["snapshot_slots"] or 0) * costs.state_bytes
    memory = geometry["blocks"] * costs.block_bytes + of_states
    is_shared = geometry.get("slabs") is not None  # then either of them would fill the memory
    names = [field.name for field in dataclasses.fields(Settings) if field.name in given]
    settings = Settings(
        memory_gib=(max(memory - of_states, of_states) if is_shared else memory) / GIB,
        state_share=None if is_shared else of_states / memory,
        **{name: given[name] for name in names},
    )
    return costs, settings


def main(argv: Sequence[str] | None = None, *, program: str = PROGRAM) -> int:
    """Simulate, and report errors for the user as one line on standard error.

    Returns:
        Exit code: 0 done, 2 bad usage.
    """
    console = Console(highlight=False, width=None if sys.stdout.isatty() else _WIDTH)
    try:
        refuse_removed_words(sys.argv[1:] if argv is None else argv, "simulate")
        arguments = _parser(program).parse_args(argv)
        work = _recorded(arguments) if arguments.server is None else _served(arguments)
        sizes, figures = describe(work.turns), _simulate(work, arguments, console)
        console.print(", ".join(f"{count} {name.replace('_', ' ')}" for name, count in sizes.items()), markup=False)
        console.print(table_of(figures))
        if arguments.output is not None:
            known = {"costs": dataclasses.asdict(work.costs), "machine": dataclasses.asdict(Machine())}
            _write(arguments.output, {"trace": sizes, **known, "points": figures})
    except ConfigError as error:
        return report_error(program, error)
    return DONE


def _recorded(arguments: argparse.Namespace) -> Workload:
    """Return the requests of a file, and the settings of the arguments."""
    names = ("max_requests", "max_tokens", "max_sequence_length")
    settings = Settings(MEMORY_GIB, **{name: getattr(arguments, name) for name in names})
    turns = read_trace(arguments.trace, arguments.requests, arguments.rate)
    return Workload(turns, MODELS[arguments.model], settings)


def _served(arguments: argparse.Namespace) -> Workload:
    """Return the recent requests of a server, and its settings."""
    key = None if arguments.api_key_file is None else read_text(arguments.api_key_file, _LONGEST_KEY).strip()
    return ask_server(arguments.server, key, arguments.requests)


def _simulate(work: Workload, arguments: argparse.Namespace, console: Console) -> list[Figures]:
    """Simulate each memory with each policy; a terminal shows the progress."""
    own = work.settings
    memories = arguments.memory_gib or [factor * own.memory_gib for factor in MEMORIES]
    budgets = [own.overtake_tokens]
    if arguments.schedule_policy is not None:
        given = (arguments.schedule_overtake_tokens, own.overtake_tokens, DEFAULT_OVERTAKE_TOKENS)
        budget = next(one for one in given if one is not None)
        budgets = [budget if one == SchedulePolicy.LPM.value else None for one in arguments.schedule_policy]
    points = [
        dataclasses.replace(own, memory_gib=memory, policy=policy, overtake_tokens=tokens)
        for memory, policy, tokens in itertools.product(memories, arguments.policy, budgets)
    ]
    shown = track(points, console=console, transient=True, disable=not console.is_terminal)
    return [_figures(work, settings, arguments.time_scale) for settings in shown]


def _figures(work: Workload, settings: Settings, time_scale: float) -> Figures:
    """Return the settings and the result of one simulation."""
    limits, slots = limits_of(work.costs, settings)
    outcome = simulate(work.turns, work.costs, settings, time_scale=time_scale)
    return {
        **dataclasses.asdict(settings),
        "schedule_policy": (SchedulePolicy.FCFS if limits.overtake_tokens is None else SchedulePolicy.LPM).value,
        "blocks": limits.total_blocks,  # the most, and of slots, if both share the memory
        "slots": slots,
        "refused": outcome.refused,
        "skipped_tokens": sum(outcome.skipped),
        "skipped_share": outcome.skipped_share,
        "lost_share": outcome.lost_tokens / max(1, sum(outcome.prompt)),
        **{f"ttft_p{percent}": outcome.ttft_percentile(percent) for percent in PERCENTILES},
        "seconds": outcome.seconds,
        "steps": outcome.steps,
    }


def table_of(figures: Sequence[Figures]) -> Table:
    """Return a table with a row for each simulation; skipped and lost tokens are shares of all prompt tokens."""
    headings = "GiB policy schedule blocks slots refused skipped lost ttft-p50 p90 p95 p99".split()
    table = Table(*headings, box=None, pad_edge=False)
    texts = ("policy", "schedule_policy", "blocks", "slots", "refused")
    numbers = ("skipped_share", "lost_share", *(f"ttft_p{percent}" for percent in PERCENTILES))
    for one in figures:
        cells = ["-" if one[name] is None else str(one[name]) for name in texts]
        table.add_row(f"{one['memory_gib']:g}", *cells, *(f"{one[name]:.3f}" for name in numbers))
    return table


def _write(path: Path, content: dict[str, object]) -> None:
    try:
        path.write_text(json.dumps(content, indent=1) + "\n", "utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error


def _list_of(read: Callable[[str], Value]) -> Callable[[str], list[Value]]:
    def values(text: str) -> list[Value]:
        return [read(one) for one in text.split(",")]

    return values


def _one_of(names: Sequence[str]) -> Callable[[str], str]:
    def name(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f"{text!r} is unknown; one of {', '.join(names)}")
        return text

    return name


def _above(kind: type[Number], bound: int) -> Callable[[str], Number]:
    """Return a reader of finite numbers above a bound."""

    def number(text: str) -> Number:
        value = kind(text)
        if not bound < value < math.inf:
            limit = f"more than {bound}" if kind is float else f"at least {bound + 1}"
            raise argparse.ArgumentTypeError(f"{text} must be {limit}")
        return value

    return number


_positive, _count, _tokens = _above(float, 0), _above(int, 0), _above(int, -1)


def _parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program,
        description="Play recorded requests through the scheduler and the prefix cache in simulated time: a row for "
        "each memory, eviction policy and schedule policy. Lists have commas; docs/policies.md has examples.",
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="recorded trace: this package's format, Mooncake's, or sessions of agents, as JSON lines, also .gz or .xz",
    )
    source.add_argument(
        "--server", metavar="URL", help="running server to take requests, model, memory and settings from"
    )
    parser.add_argument("--api-key-file", type=Path, metavar="FILE", help="file with the server's admin key")
    parser.add_argument("--requests", type=_count, help="maximum number of requests; default: all")
    parser.add_argument(
        "--memory-gib",
        type=_list_of(_positive),
        help="GiB for blocks and snapshots together; default: 4,8,16, with --server half, once and twice its memory",
    )
    parser.add_argument(
        "--policy", type=_list_of(_one_of(POLICIES)), default=POLICIES, help="default: " + ",".join(POLICIES)
    )
    parser.add_argument(
        "--schedule-policy",
        type=_list_of(_one_of([policy.value for policy in SchedulePolicy])),
        help="fcfs, lpm or both; default: fcfs, with --server its own",
    )
    parser.add_argument(
        "--schedule-overtake-tokens",
        type=_tokens,
        help=f"budget of each request under lpm; default: {DEFAULT_OVERTAKE_TOKENS}, with --server its own",
    )
    parser.add_argument(
        "--time-scale",
        type=_positive,
        default=1.0,
        help="factor of all times between requests; 0.5 doubles the load; default: 1",
    )
    parser.add_argument("--output", type=Path, metavar="FILE.json", help="write all results as JSON")
    group = parser.add_argument_group("with --trace, since a server says it")
    group.add_argument("--model", choices=tuple(MODELS), default="nemotron-h-8b")
    group.add_argument(
        "--rate",
        type=_positive,
        default=1.0,
        help="sessions of agents that start per second (a Poisson process); default: 1",
    )
    group.add_argument(
        "--max-sequence-length",
        type=_count,
        default=Settings.max_sequence_length,
        metavar="TOKENS",
        help="longest prompt and answer, others are refused; default: as the trace needs",
    )
    group.add_argument(
        "--max-requests", type=_count, default=Settings.max_requests, help="maximum number of running requests"
    )
    group.add_argument(
        "--max-tokens", type=_count, default=Settings.max_tokens, help="maximum number of tokens of a step"
    )
    return parser
