"""SI-3: whole recorded traces, each file of a folder, are played to their end.

The environment variable `MEGATRON_EXT_TRACES` names the folder; without it this module is not collected.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron_ext.config import EvictionPolicyName
from megatron_ext.simulation.formats import read_trace
from megatron_ext.simulation.replay import Replay
from megatron_ext.simulation.settings import MODELS, Batch, Machine, Settings, limits_of

FOLDER = Path(os.environ["MEGATRON_EXT_TRACES"])
FILES = sorted(path.name for path in FOLDER.iterdir() if ".jsonl" in path.suffixes)


def test_there_is_a_trace():
    assert FILES


@pytest.mark.parametrize("name", FILES)
def test_whole_traces(name: str):
    turns = read_trace(FOLDER / name)
    longest = max(turn.prompt_length + len(turn.answer) for turn in turns)
    model = MODELS["nemotron-h-8b"].reaching(longest)
    limits, slots = limits_of(model, Settings(256.0, 0.5), Batch())
    replay = Replay(turns, limits, EvictionPolicyName.LRU, slots, Machine())
    found = replay.run()
    replay.scheduler.check()
    assert found.refused == 0
    assert None not in found.ttft
    assert all(skipped < prompt for skipped, prompt in zip(found.skipped, found.prompt, strict=True))
    assert found.skipped_share > 0.1
