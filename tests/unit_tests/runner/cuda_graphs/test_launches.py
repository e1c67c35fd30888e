"""Kernel launches of a captured decode step: of each mixer, and of the rest. Counted, never timed."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from megatron_ext.config import CacheConfig, ModelConfig
from megatron_ext.mcore import platform
from megatron_ext.models.build import build_model
from megatron_ext.ops import triton
from megatron_ext.ops.backends import preferring
from megatron_ext.ops.triton.kernel_registry import watch
from megatron_ext.runner.cuda_graphs.graph_sampler import SamplerNeeds
from tests.unit_tests.support.driver import Driver, make_prompt
from tests.unit_tests.support.launches import OUTSIDE, LaunchCounter, counted
from tests.unit_tests.support.models import CONFIGS, build_slow_decay
from tests.unit_tests.support.padded import PaddedDriver

pytestmark = [
    pytest.mark.skipif(
        triton.problem(platform.device()) is not None,
        reason=f"no kernel runs here: {triton.problem(platform.device())}",
    ),
]

DTYPE = torch.bfloat16  # casts would not be seen in fp32
PATTERN = "M*-M*-"
SHAPE = {
    "hybrid_override_pattern": PATTERN,
    "hidden_size": 64,
    "num_attention_heads": 2,
    "num_query_groups": 1,
    "kv_channels": 16,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
}
MIXERS = {"M": "mixer", "*": "self_attention", "-": "mlp"}
ROTATION = 5  # angles of the step's tokens, which the first attention layer asks for
# The most of each mixer with its sum and the norm after it, by kind: of the recurrent one, of attention, of the MLP;
# and of what no mixer computes.
MOST = {
    "hybrid": (7, 6, 4, 12),
    "gated_delta_net": (7, 6, 4, 12),
    "mamba1": (12, 6, 4, 12),  # three of them are the norms of dt, B and C
}


class Unwatched(PaddedDriver):
    """Logits are not looked at, which would be operations of their own."""

    def _watch_forward(self) -> None:
        pass


def config(kind: str) -> ModelConfig:
    activation = {"squared_relu": True} if kind == "hybrid" else {"swiglu": True}
    return dataclasses.replace(CONFIGS[kind], **SHAPE, **activation)


def count_decode(of: ModelConfig, backend: str) -> LaunchCounter:
    """Count the launches of the smallest captured decode step, with padding rows only."""
    model = build_model(of, device=platform.device(), dtype=DTYPE)
    settings = {"max_requests": 2, "num_cuda_graphs": 1, "max_sequence_length": 64, "operator_backend": backend}
    fixed = Unwatched(model, of, cache=CacheConfig(), dtype=DTYPE, **settings).context.cuda_graph_runner
    bucket = next(one for one in fixed._buckets.all() if not one.prefills)
    with counted({}, computes=False):
        graphs = fixed._graphs_of(bucket)
    mixers = {
        f"{number}{letter}": getattr(model.decoder.layers[number], MIXERS[letter])
        for number, letter in enumerate(of.hybrid_override_pattern)
    }
    with torch.inference_mode(), preferring(backend), counted(mixers, model.decoder, computes=False) as counter:
        graphs.forward()
        graphs.choice.run(SamplerNeeds(is_processed=False, is_drawn=False, is_scored=False, has_mask=False))
    return counter


@pytest.mark.parametrize("kind", MOST)
def test_no_layer_launches_more_than_it_has_to(kind: str) -> None:
    """CU-5: a small kernel costs as much as a large one where few tokens decode."""
    counter, (recurrent, attention, mlp, outside) = count_decode(config(kind), triton.NAME), MOST[kind]
    of = {name: counter.of(name) for name in ("0M", "1*", "2-", "3M", "4*", "5-", OUTSIDE)}
    assert of["0M"] == of["3M"] <= recurrent, counter.launches
    assert of["4*"] <= attention, counter.launches
    assert of["1*"] <= attention + ROTATION, counter.launches
    assert of["2-"] == of["5-"] <= mlp, counter.launches
    assert of[OUTSIDE] <= outside, counter.launches


def test_norms_of_heads_are_in_the_launch_that_rotates() -> None:
    """CU-5: norms of heads, as in Qwen3, are part of the rotating launch."""
    of = dataclasses.replace(CONFIGS["attention_only"], **SHAPE | {"hybrid_override_pattern": "*-"}, qk_layernorm=True)
    counter = count_decode(of, triton.NAME)
    assert counter.of("0*") <= MOST["hybrid"][1] + ROTATION, counter.launches


def test_a_model_with_all_of_them_equals_plain_torch() -> None:
    """CU-1, CU-2: norms around one, norms of heads, positions, factors of residuals, gates after norms; in fp32."""
    of = dataclasses.replace(
        CONFIGS["hybrid"],
        **SHAPE | {"hybrid_override_pattern": "M*-"},
        swiglu=True,
        qk_layernorm=True,
        apply_layernorm_1p=True,
        residual_multiplier=0.6,
        mamba_gated_norm="norm_first",
    )
    model, found = build_slow_decay(of), {}
    for backend in ("reference", triton.NAME):
        driver = Driver(model, of, operator_backend=backend, max_requests=2)
        with watch() as launches:
            driver.add(0, make_prompt(5), num_tokens_to_generate=2)
            driver.run()
        found[backend] = driver.records[0].generated_tokens, driver.seen[0].logits
    names = {"norm_rows", "add_norm_rows", "step_sizes", "rotate_and_write", "gate_rows"}
    assert names <= {one.kernel for one in launches}
    (tokens, logits), (others, own) = found["reference"], found[triton.NAME]
    assert tokens == others
    for position, [wanted] in logits.items():
        torch.testing.assert_close(own[position][0], wanted, atol=1e-4, rtol=1e-4)


def test_plain_torch_launches_several_times_as_much() -> None:
    """Negative control: what is counted are casts, sums and copies, too, and no views."""
    counter = count_decode(config("hybrid"), "reference")
    assert counter.of("0M") > 2 * MOST["hybrid"][0]
    assert counter.of("4*") > 2 * MOST["hybrid"][1]
    with counted({}) as plain:
        torch.ones(4, 4).view(2, 8)[:, 1:].float().softmax(-1)
    assert plain.launches == {(OUTSIDE, "aten::ones"): 1, (OUTSIDE, "aten::_softmax"): 1}
