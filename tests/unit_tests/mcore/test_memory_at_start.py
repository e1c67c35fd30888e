"""SE-4: pools that do not fit the limits of the process, or turn out not to be there, are one line with a number."""

from __future__ import annotations

import pytest
import torch

from megatron_ext.config import BatchingConfig
from megatron_ext.errors import ConfigError
from megatron_ext.mcore import platform
from megatron_ext.mcore.assemble import build_engine
from megatron_ext.memory import host_limits, pools
from megatron_ext.memory.state_pool import StatePool
from tests.unit_tests.support.models import HYBRID, build_slow_decay
from tests.unit_tests.support.tokenizers import PieceTokenizer

MIB = 2**20


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return build_slow_decay(HYBRID)


def build(model: torch.nn.Module, **batching: object) -> object:
    settings = BatchingConfig(**({"max_tokens": 16} | batching))
    return build_engine(model, HYBRID, PieceTokenizer(97), settings, dtype=torch.float32)


def number_of(message: str) -> int:
    return int(message.partition("--inference-dynamic-batching-block-count ")[2].split()[0])


def test_limits_of_the_process_decide(model, monkeypatch: pytest.MonkeyPatch):
    """Memory that is free on the machine, and that `ulimit` or a control group does not leave, does not count."""
    monkeypatch.setattr(host_limits, "group_capacities", lambda: [3 * MIB])
    assert platform.available_memory(torch.device("cpu")) == 3 * MIB
    with pytest.raises(ConfigError, match=r"0\.00 GB of memory are free for this process") as caught:
        build(model, block_count=5000, block_size=16, max_requests=2)
    assert "\n" not in str(caught.value)
    fitting = number_of(str(caught.value))
    engine = build(model, block_count=fitting, block_size=16, max_requests=2)
    assert engine.plan.world.blocks == fitting


def test_an_allocation_that_fails_all_the_same(model, monkeypatch: pytest.MonkeyPatch):
    """Memory of the pools is freed, and the advice follows from what could be allocated when it was tried."""
    left = 3 * MIB

    class Failing(StatePool):
        def __init__(self, *_: object) -> None:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 5 bytes.")

    tried = []
    monkeypatch.setattr(pools, "largest_allocation", lambda device, start: tried.append(start) or left)
    with monkeypatch.context() as patch:
        patch.setattr(pools, "StatePool", Failing)
        with pytest.raises(ConfigError, match="memory for KV blocks, live states and snapshots of") as caught:
            build(model, block_count=5000, block_size=16, max_requests=2)
    assert "\n" not in str(caught.value)
    geometry = build(model, block_count=number_of(str(caught.value)), block_size=16, max_requests=2).plan.world
    assert geometry.pool_bytes <= left < tried[0]
