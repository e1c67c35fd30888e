"""Sweep of one trace over many settings of equal memory, and advice on the best."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from megatron_ext.config import EvictionPolicyName
from megatron_ext.errors import ConfigError
from megatron_ext.scheduling.plan import SchedulerLimits
from megatron_ext.scheduling.snapshots.aligned import check_aligned
from megatron_ext.scheduling.snapshots.placement import OpportunisticRules
from megatron_ext.simulation.cached_models import CachedModel
from megatron_ext.simulation.machine import Machine
from megatron_ext.simulation.replay import Outcome, Replay
from megatron_ext.simulation.trace import Turn

GIB = 1024**3
MODES = ("kernel", "align")
PLACEMENTS = ("learned", "even", "off")  # placements of opportunistic checkpoints
SPACING = OpportunisticRules().spacing


@dataclass(frozen=True)
class Settings:
    """Settings of one point of a sweep.

    Attributes:
        memory_gib: Memory of blocks and snapshot slots together; running states are separate, and equal for all points.
        state_share: Share of it for snapshots; without effect if there are no recurrent layers.
        block_size: Tokens of a block.
        policy: Name of the eviction policy.
        mode: See `SnapshotMode`.
        placement: One of `PLACEMENTS`.
        spacing: Minimum average number of blocks for each opportunistic checkpoint.
    """

    memory_gib: float
    state_share: float
    block_size: int
    policy: str
    mode: str = MODES[0]
    placement: str = PLACEMENTS[0]
    spacing: int = SPACING

    @property
    def opportunistic(self) -> OpportunisticRules:
        """Rules of opportunistic checkpoints for a scheduler."""
        return OpportunisticRules(
            0 if self.placement == "off" else None, self.spacing, is_learned=self.placement == PLACEMENTS[0]
        )


@dataclass(frozen=True)
class Batch:
    """Limits of a step, equal for all points."""

    max_requests: int = 64
    max_tokens: int = 8192
    max_prefills: int = 0


@dataclass(frozen=True)
class Point:
    """Result of one point."""

    settings: Settings
    blocks: int
    slots: int | None
    requests: int
    refused: int
    prompt_tokens: int
    skipped_tokens: int
    lost_for_slots: int
    lost_for_blocks: int
    provisional_taken: int
    provisional_consumed: int
    ttft_p50: float  # simulated seconds, as the next three
    ttft_p90: float
    ttft_p99: float
    seconds: float
    steps: int
    wall_seconds: float  # wall time of the simulation

    @property
    def skipped_share(self) -> float:
        """Share of all prompt tokens that were skipped."""
        return self.skipped_tokens / max(1, self.prompt_tokens)

    def to_dict(self) -> dict[str, object]:
        """Return the point as a dict for JSON."""
        return dataclasses.asdict(self) | {"skipped_share": self.skipped_share}


def grid(
    memories: Sequence[float],
    shares: Sequence[float],
    block_sizes: Sequence[int],
    policies: Sequence[str],
    modes: Sequence[str],
    placements: Sequence[str] = PLACEMENTS[:1],
    spacings: Sequence[int] = (SPACING,),
) -> list[Settings]:
    """Return all combinations of the values."""
    return [Settings(*one) for one in product(memories, shares, block_sizes, policies, modes, placements, spacings)]


def limits_of(model: CachedModel, settings: Settings, batch: Batch) -> tuple[SchedulerLimits, int | None]:
    """Return the scheduler limits and snapshot slots (None without recurrent layers) for a memory size.

    Raises:
        ConfigError: The memory is smaller than a block, or a step is too small for `align`.
    """
    costs = model.costs(settings.block_size)
    total, share = settings.memory_gib * GIB, settings.state_share if costs.state_bytes else 0.0
    slots = int(total * share / costs.state_bytes) if costs.state_bytes else None
    blocks = int((total - (slots or 0) * costs.state_bytes) / costs.block_bytes)
    if blocks < 1:
        raise ConfigError(
            f"{settings.memory_gib:g} GiB, {share:g} of it for snapshots, hold no block of {costs.block_bytes} bytes; "
            f"{costs.block_bytes / GIB / max(1e-9, 1 - share):.2g} would do"
        )
    limits = SchedulerLimits(
        block_size=settings.block_size,
        total_blocks=blocks,
        paused_blocks=None,
        max_requests=batch.max_requests,
        max_tokens=batch.max_tokens,
        max_sequence_length=model.longest,
        chunked_prefill=True,
        aligned_chunks=settings.mode == "align" and bool(slots),
        max_prefills=batch.max_prefills,
        costs=costs,
        opportunistic=settings.opportunistic if slots and settings.mode != "align" else OpportunisticRules(),
    )
    if limits.aligned_chunks:
        check_aligned(limits)
    return limits, slots


def run_point(turns: Sequence[Turn], model: CachedModel, settings: Settings, batch: Batch, machine: Machine) -> Point:
    """Run one simulation."""
    limits, slots = limits_of(model, settings, batch)
    began = time.perf_counter()
    outcome = Replay(turns, limits, EvictionPolicyName(settings.policy), slots, machine).run()
    return _point(settings, limits.total_blocks, slots, outcome, time.perf_counter() - began)


def _point(settings: Settings, blocks: int, slots: int | None, outcome: Outcome, wall: float) -> Point:
    assert outcome.statistics is not None, "it has come to its end"
    counters = outcome.statistics.counters
    return Point(
        settings=settings,
        blocks=blocks,
        slots=slots,
        requests=len(outcome.prompt),
        refused=outcome.refused,
        prompt_tokens=sum(outcome.prompt),
        skipped_tokens=sum(outcome.skipped),
        lost_for_slots=counters.lost_slot_tokens,
        lost_for_blocks=counters.lost_block_tokens,
        provisional_taken=outcome.statistics.use.provisional_taken,
        provisional_consumed=outcome.statistics.use.provisional_consumed,
        ttft_p50=outcome.ttft_percentile(50),
        ttft_p90=outcome.ttft_percentile(90),
        ttft_p99=outcome.ttft_percentile(99),
        seconds=outcome.seconds,
        steps=outcome.steps,
        wall_seconds=wall,
    )


def sweep(
    turns: Sequence[Turn],
    model: CachedModel,
    settings: Sequence[Settings],
    batch: Batch,
    machine: Machine,
    progress: Callable[[Point], None] = lambda point: None,
) -> Iterator[Point]:
    """Run all points in order; points that are equal without recurrent layers or state slots run once."""
    seen: dict[tuple[object, ...], Point] = {}
    for one in settings:
        limits, slots = limits_of(model, one, batch)
        key = (limits, slots, one.policy)
        if key not in seen:
            seen[key] = run_point(turns, model, one, batch, machine)
        point = dataclasses.replace(seen[key], settings=one)
        progress(point)
        yield point


@dataclass(frozen=True)
class Advice:
    """Settings that would have skipped most of a trace, for one memory size.

    Attributes:
        best: Best point.
        flags: Command line flags of the best point.
        gain: Skipped tokens relative to those of `given`, taken as at least one.
        given: Point of comparison.
    """

    best: Point
    flags: tuple[str, ...]
    gain: float
    given: Point


DEFAULT_STATE_SHARE = 0.2  # a quarter of the buffer, on top of it
DEFAULT = Settings(0.0, DEFAULT_STATE_SHARE, 64, EvictionPolicyName.LRU.value)


def advise(points: Sequence[Point], given_settings: Settings = DEFAULT) -> list[Advice]:
    """Return the best settings for each memory size: most skipped tokens, then shortest time to first token.

    Args:
        points: Points of a sweep.
        given_settings: Settings of comparison, or the closest ones of the same memory. By default those of the package:
            blocks of 64 tokens, `lru`, `kernel`, a fifth of the memory for snapshots.
    """
    advice = []
    for memory in sorted({point.settings.memory_gib for point in points}):
        here = [point for point in points if point.settings.memory_gib == memory]
        best = max(here, key=lambda point: (point.skipped_tokens, -point.ttft_p50))
        given = min(here, key=lambda point: _distance(point.settings, given_settings))
        gain = max(1, best.skipped_tokens) / max(1, given.skipped_tokens)
        advice.append(Advice(best, flags_of(best), gain, given))
    return advice


def _distance(settings: Settings, given: Settings) -> tuple[bool, bool, bool, int, int, float]:
    return (
        settings.policy != given.policy,
        settings.mode != given.mode,
        settings.placement != given.placement,
        abs(settings.spacing - given.spacing),
        abs(settings.block_size - given.block_size),
        abs(settings.state_share - given.state_share),
    )


def flags_of(point: Point) -> tuple[str, ...]:
    """Return the flags with numbers of blocks and slots, which do not depend on other contents of a buffer."""
    prefix, settings = "--inference-dynamic-batching", point.settings
    flags = [
        f"{prefix}-block-size {settings.block_size}",
        f"{prefix}-block-count {point.blocks}",
        f"{prefix}-prefix-caching-eviction-policy {settings.policy}",
    ]
    if point.slots is not None:
        states = settings.memory_gib * settings.state_share
        flags += [
            f"{prefix}-prefix-caching-mamba-gb {states:.4g}",
            f"{prefix}-prefix-caching-mamba-mode {settings.mode}",
        ]
    if point.slots is not None and settings.placement == "off":
        flags.append(f"{prefix}-prefix-caching-provisional-slots 0")
    return tuple(flags)
