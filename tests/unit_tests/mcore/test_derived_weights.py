"""RL-1: whatever an engine derives from weights is renewed, for a change of each of the model's tensors."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from megatron_ext.mcore.weight_changes import saved_tensors
from megatron_ext.models.update.shards import ShardOptions
from megatron_ext.ops.linear import Packable, onednn
from tests.unit_tests.support.driver import Driver, assert_equals_oracle, make_prompt
from tests.unit_tests.support.hybrid_caching import HybridDriver
from tests.unit_tests.support.models import CONFIGS, build_slow_decay
from tests.unit_tests.support.oracle import Oracle
from tests.unit_tests.support.weights import writer_of

PROMPT = make_prompt(21)
BACKEND = "onednn" if onednn.problem() is None else "auto"  # packs all, or as the table says
KINDS = ["hybrid", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("gated_delta_net", "mamba1", "experts"))]


def derived(driver: Driver) -> dict[str, int]:
    """Number of things derived from weights that the engine holds, by name; rates of states are never held."""
    model, context = driver.engine.controller.inference_wrapped_model.model, driver.context
    return {
        "packed weights": sum(isinstance(one, Packable) and one.packed is not None for one in model.modules()),
        "recorded steps": 0 if context.recorded_steps is None else len(context.recorded_steps._sizes),
        "captured graphs": 0 if context.cuda_graph_runner is None else 1,
        "samples": 0 if driver.engine.core.resources._samples is None else 1,
    }


@pytest.mark.parametrize("way", ["tensors", pytest.param("shards", marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", KINDS)
def test_each_source(kind: str, way: str):
    """RL-1: the logits are those of a plain recompute of the changed model, and differ from those before."""
    config = dataclasses.replace(CONFIGS[kind], hybrid_override_pattern="ME*" if kind == "experts" else "M*-")
    plain = build_slow_decay(config)
    driver = HybridDriver(build_slow_decay(config), config, packs_weights=True, operator_backend=BACKEND)
    driver.sight(0, PROMPT)
    held = derived(driver)
    writer = writer_of(driver.engine.controller.inference_wrapped_model.model, source_is_gpt=False)
    assert BACKEND == "auto" or held["packed weights"] > 0
    assert any(held.values())
    before = driver.records[0].generated_log_probs
    generator = torch.Generator().manual_seed(4)
    for request_id, (name, tensor) in enumerate(sorted(saved_tensors(plain).items()), start=1):
        new = tensor + 0.2 * torch.randn(tensor.shape, generator=generator)
        writer_of(plain).write({name: new}, partial=True)
        if way == "shards":
            writer.write_shards({name: new}, ShardOptions(partial=True))
        else:
            writer.write({name: new}, partial=True)
        driver.engine.core.weights_changed()
        driver.sight(request_id, PROMPT)
        assert_equals_oracle(driver, request_id, Oracle(plain))
        after = driver.records[request_id].generated_log_probs
        if "local_experts" not in name:  # of which one may get no token
            assert after != pytest.approx(before, abs=1e-6), f"{name} has no effect on the logits"
        before = after
        assert derived(driver) == held, "it is held again"
