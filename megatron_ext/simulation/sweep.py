"""Sweep of one trace over many settings of equal memory, and advice on the best."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from megatron_ext.config import EvictionPolicyName
from megatron_ext.config.costs import EntryCosts
from megatron_ext.errors import ConfigError
from megatron_ext.memory.arena import MIN_SLABS, ArenaBudget, aligned, plan_slabs
from megatron_ext.prefix_cache.slab_layout import SlabLayout
from megatron_ext.scheduling.plan import SchedulerLimits
from megatron_ext.scheduling.snapshots.aligned import check_aligned
from megatron_ext.scheduling.snapshots.placement import OpportunisticRules
from megatron_ext.simulation.cached_models import CachedModel
from megatron_ext.simulation.disk import DiskSettings
from megatron_ext.simulation.machine import Machine
from megatron_ext.simulation.replay import Outcome, Replay
from megatron_ext.simulation.trace import Turn

GIB = 1024**3
MODES = ("kernel", "align")
PLACEMENTS = ("even", "off")  # placements of opportunistic checkpoints
SPACING = OpportunisticRules().spacing
ROOMY = 1000  # slabs for which a memory surely has room
DEFAULT_STATE_SHARE = 0.2  # of a split: a quarter of the buffer, on top of it


@dataclass(frozen=True)
class Settings:
    """Settings of one point of a sweep.

    Attributes:
        memory_gib: Memory of blocks and snapshot slots together; running states are separate, and equal for all points.
        state_share: Share of it for snapshots; None if blocks and snapshots share it all, as by default in an engine.
            Without effect if there are no recurrent layers.
        block_size: Tokens of a block.
        policy: Name of the eviction policy.
        mode: See `SnapshotMode`.
        placement: One of `PLACEMENTS`.
        spacing: Minimum average number of blocks for each opportunistic checkpoint.
    """

    memory_gib: float
    state_share: float | None
    block_size: int
    policy: str
    mode: str = MODES[0]
    placement: str = PLACEMENTS[0]
    spacing: int = SPACING

    @property
    def opportunistic(self) -> OpportunisticRules:
        """Rules of opportunistic checkpoints for a scheduler."""
        return OpportunisticRules(0 if self.placement == "off" else None, self.spacing)


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
    blocks: int  # the most, and of slots, if both share the memory
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
    disk: dict[str, object] | None = None  # counts as in `prefix_cache_disk` of a run; None without a disk

    @property
    def skipped_share(self) -> float:
        """Share of all prompt tokens that were skipped."""
        return self.skipped_tokens / max(1, self.prompt_tokens)

    def to_dict(self) -> dict[str, object]:
        """Return the point as a dict for JSON."""
        return dataclasses.asdict(self) | {"skipped_share": self.skipped_share}


def grid(
    memories: Sequence[float],
    shares: Sequence[float | None],
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
    total, share = settings.memory_gib * GIB, _share(settings.state_share) if costs.state_bytes else 0.0
    slabs = slabs_of(costs, int(total)) if settings.state_share is None and costs.state_bytes else None
    slots = int(total * share / costs.state_bytes) if costs.state_bytes else None
    blocks = int((total - (slots or 0) * costs.state_bytes) / costs.block_bytes)
    if blocks < 1:
        raise ConfigError(
            f"{settings.memory_gib:g} GiB, {share:g} of it for snapshots, hold no block of {costs.block_bytes} bytes; "
            f"{costs.block_bytes / GIB / max(1e-9, 1 - share):.2g} would do"
        )
    limits = SchedulerLimits(
        block_size=settings.block_size,
        total_blocks=blocks if slabs is None else slabs.blocks,
        paused_blocks=None,
        max_requests=batch.max_requests,
        max_tokens=batch.max_tokens,
        max_sequence_length=model.longest,
        chunked_prefill=True,
        aligned_chunks=settings.mode == "align" and bool(slots),
        max_prefills=batch.max_prefills,
        costs=costs,
        opportunistic=settings.opportunistic if slots and settings.mode != "align" else OpportunisticRules(),
        slabs=slabs,
    )
    if limits.aligned_chunks:
        check_aligned(limits)
    return limits, slots if slabs is None else slabs.snapshot_slots


def _share(share: float | None) -> float:
    """Return the share for snapshots of a split; where slabs are impossible, that of an engine."""
    return DEFAULT_STATE_SHARE if share is None else share


def slabs_of(costs: EntryCosts, memory: int) -> SlabLayout | None:
    """Return the slabs in so many bytes, as an engine plans them; None if it splits the memory instead.

    The dummy block and slots beside those of snapshots, which an engine adds, are left out as in a split.
    """
    block, record = aligned(costs.block_bytes), aligned(costs.state_bytes)
    layout = plan_slabs([ArenaBudget(ROOMY * (block + record), block, record, 0, 0)])
    if layout is None:
        return None
    slab = ArenaBudget(0, block, record, 0, 0).slab_bytes(layout.blocks_per_slab, layout.snapshots_per_slab)
    slabs, rest = divmod(memory, slab)
    spare = rest // (slab // layout.blocks_per_slab)
    return dataclasses.replace(layout, slabs=slabs, spare_blocks=spare) if slabs >= MIN_SLABS else None


def run_point(
    turns: Sequence[Turn],
    model: CachedModel,
    settings: Settings,
    batch: Batch,
    machine: Machine,
    disk: DiskSettings | None = None,
) -> Point:
    """Run one simulation; `disk` as in `Replay`."""
    limits, slots = limits_of(model, settings, batch)
    began = time.perf_counter()
    outcome = Replay(turns, limits, EvictionPolicyName(settings.policy), slots, machine, disk).run()
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
        disk=outcome.statistics.prefix_cache_disk(),
    )


def sweep(
    turns: Sequence[Turn],
    model: CachedModel,
    settings: Sequence[Settings],
    batch: Batch,
    machine: Machine,
    progress: Callable[[Point], None] = lambda point: None,
    disk: DiskSettings | None = None,
) -> Iterator[Point]:
    """Run all points in order; points that are equal without recurrent layers or state slots run once."""
    seen: dict[tuple[object, ...], Point] = {}
    for one in settings:
        limits, slots = limits_of(model, one, batch)
        key = (limits, slots, one.policy)
        if key not in seen:
            seen[key] = run_point(turns, model, one, batch, machine, disk=disk)
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


DEFAULT = Settings(0.0, None, 64, EvictionPolicyName.LRU.value)


def advise(points: Sequence[Point], given_settings: Settings = DEFAULT) -> list[Advice]:
    """Return the best settings for each memory size: most skipped tokens, then shortest time to first token.

    Args:
        points: Points of a sweep.
        given_settings: Settings of comparison, or the closest ones of the same memory. By default those of the package:
            blocks of 64 tokens, `lru`, `kernel`, one memory for blocks and snapshots.
    """
    advice = []
    for memory in sorted({point.settings.memory_gib for point in points}):
        here = [point for point in points if point.settings.memory_gib == memory]
        best = max(here, key=lambda point: (point.skipped_tokens, -point.ttft_p50))
        given = min(here, key=lambda point: _distance(point.settings, given_settings))
        gain = max(1, best.skipped_tokens) / max(1, given.skipped_tokens)
        advice.append(Advice(best, flags_of(best), gain, given))
    return advice


def _distance(settings: Settings, given: Settings) -> tuple[bool, bool, bool, bool, int, int, float]:
    return (
        (settings.state_share is None) != (given.state_share is None),
        settings.policy != given.policy,
        settings.mode != given.mode,
        settings.placement != given.placement,
        abs(settings.spacing - given.spacing),
        abs(settings.block_size - given.block_size),
        abs(_share(settings.state_share) - _share(given.state_share)),
    )


def flags_of(point: Point) -> tuple[str, ...]:
    """Return the flags; a split has numbers of blocks and slots, which do not depend on other contents of a buffer."""
    prefix, settings = "--inference-dynamic-batching", point.settings
    is_split = point.slots is None or settings.state_share is not None
    flags = [
        f"{prefix}-block-size {settings.block_size}",
        f"{prefix}-block-count {point.blocks}" if is_split else f"{prefix}-buffer-size-gb {settings.memory_gib:.4g}",
        f"{prefix}-prefix-caching-eviction-policy {settings.policy}",
    ]
    if point.slots is not None and settings.state_share is not None:
        flags.append(f"{prefix}-prefix-caching-mamba-gb {settings.memory_gib * settings.state_share:.4g}")
    if point.slots is not None:
        flags.append(f"{prefix}-prefix-caching-mamba-mode {settings.mode}")
    if point.slots is not None and settings.placement == "off":
        flags.append(f"{prefix}-prefix-caching-provisional-slots 0")
    return tuple(flags)
