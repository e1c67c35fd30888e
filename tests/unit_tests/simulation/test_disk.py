"""SI-3, EX-11: the disk tier in simulated time."""

from __future__ import annotations

import dataclasses
import json

import pytest

from megatron_ext.commands import simulate
from megatron_ext.config import EvictionPolicyName
from megatron_ext.prefix_cache.disk.entry import EntryKey, EntryKind, NewEntry
from megatron_ext.prefix_cache.disk.extents import PAGE_BYTES
from megatron_ext.prefix_cache.disk.tier_storage import Gone, Loaded, LoadItem
from megatron_ext.simulation.cached_models import MODELS
from megatron_ext.simulation.disk import GB, GIB, DiskSettings, SimulatedStorage
from megatron_ext.simulation.generators import GENERATORS, Size
from megatron_ext.simulation.machine import Machine
from megatron_ext.simulation.replay import Replay
from megatron_ext.simulation.sweep import Batch, Settings, limits_of, run_point

HYBRID, ATTENTION = MODELS["nemotron-h-8b"], MODELS["llama-3-8b"]
SMALL = Settings(2.0, 0.2, 64, "lru")
DISK = DiskSettings(64.0, 2.0)
KEYS = [EntryKey(EntryKind.BLOCK, bytes([number]) * 32) for number in range(6)]


class World:
    """A storage of four entries of a page, each of which takes a second."""

    def __init__(self) -> None:
        self.now = 0.0
        settings = DiskSettings(4 * PAGE_BYTES / GIB, PAGE_BYTES / GB)
        self.storage = SimulatedStorage(settings, lambda: self.now, self.pass_time)

    def pass_time(self, moment: float) -> None:
        self.now = moment

    def write(self, number: int, used: float) -> bool:
        entry = NewEntry(KEYS[number], bytes(32), 1, (), used=used)
        return self.storage.write(KEYS[number], PAGE_BYTES, lambda: (entry, ()))

    def load(self, number: int, *entries: int) -> None:
        self.storage.load(number, [LoadItem(KEYS[one], (PAGE_BYTES,)) for one in entries])


def test_loads_go_before_writes_and_take_their_time():
    """Entries that wait to be written are loaded without the disk; a write that is under way ends first."""
    world = World()
    for number in range(3):
        world.write(number, used=number)
    world.now = 1.5  # the first one is on disk, the second one under way
    world.load(1, 0, 2)
    assert world.storage.take() == []
    world.storage.wait(0.005)
    assert world.now == 2.0
    world.storage.wait(0.005)
    assert world.now == 3.0
    assert world.storage.take() == [Loaded(1, [(), ()], 1.0)]
    world.load(2, 5)
    world.load(3, 0)
    world.storage.cancel(3)
    world.now = 9.0
    assert world.storage.take() == [Loaded(2, None, 0.0)]
    tally = world.storage.tally
    assert (tally.written, tally.read, tally.write_seconds, tally.read_seconds) == (3, 1, 3.0, 1.0)


def test_the_least_recently_used_are_evicted():
    world = World()
    for number in range(4):
        world.write(number, used=number)
    world.now = 4.0
    world.storage.touch([KEYS[0]], 10.0)
    world.write(4, used=11.0)
    world.write(5, used=0.5)
    world.now = 6.0
    assert world.storage.take() == [Gone([KEYS[1], KEYS[5]])]
    assert dict(world.storage.drops) == {"evicted": 1, "less_worth": 1}
    world.storage.remove([KEYS[0]])
    world.load(1, 0)
    assert world.storage.take() == [Loaded(1, None, 0.0)]
    world.storage.clear()
    assert world.storage.tally.entries == {EntryKind.BLOCK: 0, EntryKind.SNAPSHOT: 0}


@pytest.mark.parametrize("model", [HYBRID, ATTENTION], ids=["hybrid", "attention"])
def test_a_disk_brings_back_what_memory_gave_up(model):
    """More is skipped with a disk, all that more is said to come from it, and equal runs are equal."""
    turns = GENERATORS["chat"](Size(150, scale=0.5))
    without, disk, again, tiny, slow = (
        run_point(turns, model, SMALL, Batch(), Machine(), disk=one)
        for one in (None, DISK, DISK, DiskSettings(0.01, 2.0), DiskSettings(64.0, 1e-4))
    )
    assert without.disk is None
    assert without.lost_for_blocks + without.lost_for_slots > 0
    assert disk.skipped_tokens > without.skipped_tokens
    assert disk.disk["skipped_tokens"] >= disk.skipped_tokens - without.skipped_tokens > 0
    assert disk.disk["loads_placed"] > 0
    assert dataclasses.replace(again, wall_seconds=0.0) == dataclasses.replace(disk, wall_seconds=0.0)
    assert tiny.skipped_tokens < disk.skipped_tokens
    assert tiny.disk["bytes"] <= tiny.disk["limit_bytes"] == int(0.01 * GIB) // PAGE_BYTES * PAGE_BYTES
    assert slow.disk["loads_slower"] + slow.disk["loads_late"] > 0
    assert slow.disk["skipped_tokens"] < disk.disk["skipped_tokens"]


def test_all_requests_that_wait_for_the_disk_are_served():
    """Time passes until the disk is done where nothing else can be computed."""
    turns = GENERATORS["chat"](Size(60, scale=0.5))
    limits, slots = limits_of(HYBRID, SMALL, Batch(max_requests=1))
    replay = Replay(turns, limits, EvictionPolicyName.LRU, slots, Machine(), disk=DISK)
    outcome = replay.run()
    replay.scheduler.check()
    assert None not in outcome.ttft
    assert outcome.statistics.disk.tier["load_waits"] > 0


def test_the_tool_reports_the_disk(tmp_path, capsys):
    output = tmp_path / "found.json"
    arguments = ["--generate", "chat", "--requests", "40", "--scale", "0.5", "--memory-gib", "2", "--policy", "lru"]
    assert simulate.main([*arguments, "--disk-gib", "64", "--output", str(output)]) == 0
    (point,) = json.loads(output.read_text())["points"]
    assert point["disk"]["loads"] >= 0
    assert "from disk" in capsys.readouterr().out
    assert simulate.main([*arguments, "--output", str(output)]) == 0
    assert json.loads(output.read_text())["points"][0]["disk"] is None
    assert "from disk" not in capsys.readouterr().out
