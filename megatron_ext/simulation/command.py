"""Flags, tables and files of the command `simulate`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from rich.console import Console

from megatron_ext.config import EvictionPolicyName
from megatron_ext.errors import ConfigError
from megatron_ext.files import read_text
from megatron_ext.simulation.cached_models import MODELS, CachedModel
from megatron_ext.simulation.disk import DiskSettings
from megatron_ext.simulation.formats import read_trace
from megatron_ext.simulation.generators import GENERATORS, Size
from megatron_ext.simulation.machine import Machine
from megatron_ext.simulation.running import RunningServer, ask_server
from megatron_ext.simulation.server_advice import comparisons, settings_of
from megatron_ext.simulation.sweep import (
    DEFAULT,
    MODES,
    PLACEMENTS,
    SPACING,
    Batch,
    Point,
    Settings,
    advise,
    grid,
    run_point,
    sweep,
)
from megatron_ext.simulation.sweep_report import draw, draw_heat_map, lines_of, results, table_of
from megatron_ext.simulation.trace import Ids, Turn, describe, longest_request
from megatron_ext.simulation.trace_formats.sessions import SessionOptions

HEAT_LENGTHS = (128, 512, 2048, 8192)
_HEAT_REQUESTS = 32
_LONGEST_KEY = 4096  # bytes
Value = TypeVar("Value")


def simulate(argv: Sequence[str] | None, program: str, console: Console) -> None:
    """Parse the arguments, simulate, print and write the results.

    Raises:
        ConfigError: The arguments are invalid, or a file cannot be read or written.
    """
    arguments = _parser(program).parse_args(argv)
    if arguments.server is not None:
        _simulate_server(arguments, console)
        return
    turns = _trace(arguments)
    model, batch = MODELS[arguments.model], Batch(arguments.max_requests, arguments.max_tokens, arguments.max_prefills)
    if arguments.trace is not None:
        model = model.reaching(arguments.max_sequence_length or longest_request(turns))
    memories, shares = arguments.memory_gib or [4.0, 8.0, 16.0], arguments.state_share or [None]
    axes = (arguments.block_size, arguments.policy, arguments.mode, arguments.placement, arguments.spacing)
    run = _Run(arguments, console, model, batch, grid(memories, shares, *axes), DEFAULT)
    content = run.simulate(turns, arguments.plots)
    if arguments.common_prefixes:
        console.print("\nWith common prefixes of sessions with equal numbers of tool tokens and system tokens:")
        folder = None if arguments.plots is None else arguments.plots / "common_prefixes"
        content["with_common_prefixes"] = run.simulate(_trace(arguments, shares_prefixes=True), folder)
    run.write(content)


def _simulate_server(arguments: argparse.Namespace, console: Console) -> None:
    """Simulate a server's recent requests with its own memory and settings, and with others for comparison."""
    key = None if arguments.api_key_file is None else read_text(arguments.api_key_file, _LONGEST_KEY).strip()
    server = ask_server(arguments.server, key, arguments.requests)
    if arguments.advise:
        _advise_server(arguments, console, server)
        return
    memories, shares = arguments.memory_gib or server.memories(), arguments.state_share or server.shares()
    sizes, own = sorted({server.settings.block_size, *arguments.block_size}), server.settings
    policies, modes = sorted({own.policy, *arguments.policy}), sorted({own.mode, *arguments.mode})
    axes = (sizes, policies, modes, arguments.placement, arguments.spacing)
    settings = grid(memories, shares, *axes)
    run = _Run(arguments, console, server.model, server.batch, settings, own)
    run.write(run.simulate(server.turns, arguments.plots))


def _advise_server(arguments: argparse.Namespace, console: Console, server: RunningServer) -> None:
    """Compare a server's settings with others, in three lines."""
    memories, shares = arguments.memory_gib or server.memories(), arguments.state_share or server.shares()
    found = comparisons(server, memories, shares, arguments.policy)
    run = _Run(arguments, console, server.model, server.batch, settings_of(found), server.settings)
    points = run.points(server.turns)
    by_settings, sizes = {point.settings: point for point in points}, describe(server.turns)
    lines = {one.subject: one.line(by_settings) for one in found}
    for line in lines.values():
        console.print(line, markup=False, soft_wrap=True)
    run.write(results(sizes, points, [], dataclasses.asdict(run.machine)) | {"advice": lines})


@dataclass(frozen=True)
class _Run:
    """Simulation of traces under the same settings.

    Attributes:
        arguments: Arguments of the command.
        console: Console of the tables.
        model: Model, by its costs.
        batch: Limits of a step.
        settings: Settings to simulate.
        given: Settings that advice compares with.
    """

    arguments: argparse.Namespace
    console: Console
    model: CachedModel
    batch: Batch
    settings: Sequence[Settings]
    given: Settings

    @property
    def machine(self) -> Machine:
        """Simulated machine."""
        given = self.arguments
        return Machine(given.flops, given.bandwidth, given.parameter_bytes, given.step_overhead)

    @property
    def disk(self) -> DiskSettings | None:
        """Disk of the simulated machine, if it has one."""
        given = self.arguments
        return None if given.disk_gib is None else DiskSettings(given.disk_gib, given.disk_gbps)

    def points(self, turns: Sequence[Turn]) -> list[Point]:
        """Simulate a trace under all settings; a terminal shows the progress."""
        points: list[Point] = []
        for point in sweep(turns, self.model, self.settings, self.batch, self.machine, disk=self.disk):
            points.append(point)
            if len(self.settings) > 1 and self.console.is_terminal:
                self.console.print(f"{len(points)} of {len(self.settings)}: {point.wall_seconds:.1f} s", style="dim")
        return points

    def simulate(self, turns: Sequence[Turn], plots: Path | None) -> dict[str, object]:
        """Simulate a trace under all settings, print a table and advice, draw, and return the results for JSON."""
        console, points = self.console, self.points(turns)
        advice, sizes = advise(points, self.given) if self.arguments.advise else [], describe(turns)
        console.print(", ".join(f"{count} {name.replace('_', ' ')}" for name, count in sizes.items()), markup=False)
        console.print(table_of(points))
        for line in lines_of(advice):
            console.print(line, markup=False, soft_wrap=True)
        if plots is not None:
            heat_map = _heat_map(plots, self.model, self.settings[0], self.batch, self.machine)
            for path in [*draw(points, plots), heat_map]:
                console.print(f"drawn: {path}", markup=False, soft_wrap=True)
        return results(sizes, points, advice, dataclasses.asdict(self.machine))

    def write(self, content: dict[str, object]) -> None:
        """Write results to the file of the arguments, if any."""
        path: Path | None = self.arguments.output
        if path is None:
            return
        try:
            path.write_text(json.dumps(content, indent=1) + "\n", "utf-8")
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}") from error


def _trace(arguments: argparse.Namespace, *, shares_prefixes: bool = False) -> list[Turn]:
    if arguments.trace is not None:
        sessions = SessionOptions(arguments.rate, arguments.seed, shares_prefixes)
        return read_trace(arguments.trace, arguments.requests, sessions)
    size = Size(arguments.requests or 1000, arguments.rate, arguments.scale, arguments.seed)
    return list(GENERATORS[arguments.generate](size))


def _heat_map(folder: Path, model: CachedModel, settings: Settings, batch: Batch, machine: Machine) -> Path:
    """Compute the skipped share of alternating prompts with four prefixes, under the first settings."""
    shares = {}
    for shared in HEAT_LENGTHS:
        for own in HEAT_LENGTHS:
            point = run_point(alternating(shared, own), model, settings, batch, machine)
            shares[shared, own] = point.skipped_share
    return draw_heat_map(shares, folder / "heat_map.png")


def alternating(shared: int, own: int, count: int = _HEAT_REQUESTS) -> list[Turn]:
    """Return requests a second apart whose first tokens are one of four prefixes in turn, the rest unique."""
    ids = Ids()
    prefixes = [ids.take(shared) for _ in range(4)]
    return [Turn(i, float(i), (prefixes[i % 4], ids.take(own)), ids.take(1)) for i in range(count)]


def _list_of(read: Callable[[str], Value]) -> Callable[[str], list[Value]]:
    def values(text: str) -> list[Value]:
        return [read(one) for one in text.split(",")]

    return values


def _one_of(choices: Sequence[str]) -> Callable[[str], str]:
    def name(text: str) -> str:
        if text not in choices:
            raise argparse.ArgumentTypeError(f"{text!r} is unknown; one of {', '.join(choices)}")
        return text

    return name


def _positive(text: str) -> float:
    number = float(text)
    if not (math.isfinite(number) and number > 0):
        raise argparse.ArgumentTypeError(f"{text} must be more than zero")
    return number


def _share(text: str) -> float | None:
    if text == "any":
        return None
    number = float(text)
    if not 0 <= number < 1:
        raise argparse.ArgumentTypeError(f"{text} must be zero or more, and less than 1, or any")
    return number


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} must be 1 or more")
    return number


def _parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program,
        description="Run a trace of requests through the scheduler and the prefix cache in simulated time. Lists "
        "are separated by commas, and all combinations are run; docs/policies.md has examples.",
    )
    _add_source(parser)
    parser.add_argument("--model", choices=tuple(MODELS), default="nemotron-h-8b")
    parser.add_argument(
        "--memory-gib",
        type=_list_of(_positive),
        help="GiB for blocks and snapshots together; default: 4,8,16, with --server half, once and twice its memory",
    )
    parser.add_argument(
        "--state-share",
        type=_list_of(_share),
        help="share of the memory for snapshots, or any: blocks and snapshots share it all; default: any, with "
        "--server its own and others",
    )
    parser.add_argument("--block-size", type=_list_of(_count), default=[64], help="tokens")
    policies = [policy.value for policy in EvictionPolicyName]
    parser.add_argument(
        "--policy", type=_list_of(_one_of(policies)), default=["lru", "flops"], help=", ".join(policies)
    )
    parser.add_argument("--mode", type=_list_of(_one_of(MODES)), default=[MODES[0]], help=", ".join(MODES))
    parser.add_argument(
        "--placement",
        type=_list_of(_one_of(PLACEMENTS)),
        default=[PLACEMENTS[0]],
        help="placement of opportunistic checkpoints: " + ", ".join(PLACEMENTS),
    )
    parser.add_argument(
        "--spacing", type=_list_of(_count), default=[SPACING], help="minimum number of blocks between those"
    )
    _add_machine(parser)
    parser.add_argument(
        "--advise",
        action="store_true",
        help="print the settings that skip the most tokens; with --server, compare its memory, "
        "split and policy with others, in three lines; the block size, mode and placement stay as they are",
    )
    parser.add_argument("--output", type=Path, metavar="FILE.json", help="write all results as JSON")
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="write plots to this folder; needs matplotlib")
    return parser


def _add_source(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="recorded trace: this package's format, Mooncake's, or sessions of agents, as .jsonl or .json, also .gz "
        "or .xz",
    )
    source.add_argument(
        "--generate", choices=tuple(GENERATORS), default="mixed", help="generator of a synthetic trace; default: mixed"
    )
    source.add_argument(
        "--server", metavar="URL", help="running server to take requests, model, memory and settings from"
    )
    parser.add_argument("--api-key-file", type=Path, metavar="FILE", help="file with the server's admin key")
    parser.add_argument("--requests", type=_count, help="number of requests; default: all of a file, 1000 generated")
    parser.add_argument(
        "--rate",
        type=_positive,
        default=1.0,
        help="sessions that start per second, generated or of agents (a Poisson process); default: 1",
    )
    parser.add_argument("--scale", type=_positive, default=1.0, help="scaling factor of generated lengths")
    parser.add_argument("--seed", type=int, default=0, help="of generated traces and of sessions' starts; default: 0")
    parser.add_argument(
        "--common-prefixes",
        action="store_true",
        help="simulate recorded sessions a second time, with common blocks for the tools and system prompts of those "
        "that have as many tokens of both",
    )
    parser.add_argument(
        "--max-sequence-length",
        type=_count,
        metavar="TOKENS",
        help="longest prompt and answer of a recorded trace, others are refused; default: as the trace needs",
    )


def _add_machine(parser: argparse.ArgumentParser) -> None:
    batch, machine = Batch(), Machine()
    parser.add_argument(
        "--max-requests", type=_count, default=batch.max_requests, help="maximum number of running requests"
    )
    parser.add_argument(
        "--max-tokens", type=_count, default=batch.max_tokens, help="maximum number of tokens of a step"
    )
    parser.add_argument(
        "--max-prefills", type=int, default=batch.max_prefills, help="maximum number of prefills of a step; 0: no limit"
    )
    parser.add_argument("--flops", type=_positive, default=machine.flops, help="operations per second, for a prefill")
    parser.add_argument("--bandwidth", type=_positive, default=machine.bytes, help="bytes per second, for a decode")
    parser.add_argument(
        "--parameter-bytes",
        type=_positive,
        default=machine.parameter_bytes,
        help="bytes of parameters, read in each step",
    )
    parser.add_argument("--step-overhead", type=_positive, default=machine.overhead, help="seconds")
    parser.add_argument(
        "--disk-gib", type=_positive, help="GiB on a disk for what leaves memory, as --prefix-cache-dir; default: none"
    )
    parser.add_argument(
        "--disk-gbps", type=_positive, default=2.0, help="GB per second that the disk reads or writes; default: 2"
    )
