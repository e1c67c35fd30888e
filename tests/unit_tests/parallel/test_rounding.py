"""MR-3 in bf16: ranks that share a layer round their partial products.

Compared with the same weights in fp32 are the layer outputs of each prompt's prefill and the prompts' log-probs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ext.config import ModelConfig, ParallelConfig
from megatron_ext.mcore import platform
from megatron_ext.mcore.layers.linear import RowLinear
from megatron_ext.models.build import build_model
from tests.unit_tests.support.driver import Driver, make_prompt
from tests.unit_tests.support.models import CONFIGS, build_slow_decay
from tests.unit_tests.support.ranks import run_ranks
from tests.unit_tests.support.spread import Whole, fill, whole_parameters

pytestmark = pytest.mark.worlds

# The bound of docs/ranks.md: error of several ranks against fp32, as a multiple of one rank's.
LARGEST_FACTOR = 1.25
SIZES = {
    "vocab_size": 128,  # else ranks pad it
    "hidden_size": 192,
    "ffn_hidden_size": 512,
    "num_attention_heads": 8,
    "num_query_groups": 4,
    "mamba_head_dim": 24,
    "mamba_num_heads": 16,
    "mamba_num_groups": 4,
}
MODELS = {
    "hybrid": dataclasses.replace(CONFIGS["hybrid"], **SIZES),
    "gpt": dataclasses.replace(CONFIGS["attention_only"], hybrid_override_pattern="*-*-*-", **SIZES),
}
PROMPTS = [make_prompt(40 + 7 * number, seed=number) for number in range(8)]
KEPT_IN_FP32 = frozenset({"A_log", "D"})


@dataclass
class Outputs:
    """Outputs of a model for all prompts, in fp32.

    Attributes:
        layers: Outputs of each layer, [tokens of all prompts, hidden size].
        log_probs: Log-probs of all prompt tokens that have one.
        tokens: Generated tokens of each prompt.
    """

    layers: list[Tensor]
    log_probs: Tensor
    tokens: list[tuple[int, ...]]


def with_six_bits(part: Tensor) -> Tensor:
    """Round to six significant bits, where bf16 has eight."""
    mantissa, exponent = torch.frexp(part)
    return torch.ldexp((mantissa * 64).round() / 64, exponent)


def sum_with_six_bits(self: RowLinear, input_: Tensor) -> tuple[Tensor, None]:
    """Forward of `RowLinear` that rounds fp32 partial products to six bits, adds them, and rounds the sum."""
    output = with_six_bits(F.linear(input_.float(), self.weight.float()))
    torch.distributed.all_reduce(output, group=self.tp_group)
    return output.to(input_.dtype), None


def observe(config: ModelConfig, whole: Whole, dtype: torch.dtype) -> Outputs:
    """Prefill each prompt in one step and generate 4 tokens."""
    model = build_model(config, dtype=dtype, device=torch.device("cpu"))
    fill(model, whole)
    seen: list[list[Tensor]] = [[] for _ in model.decoder.layers]
    for layer, outputs in zip(model.decoder.layers, seen, strict=True):
        layer.register_forward_hook(
            lambda _module, _inputs, output, outputs=outputs: outputs.append(
                (output[0] if isinstance(output, tuple) else output).float().flatten(0, 1)
            )
        )
    driver = Driver(model, config, dtype=dtype)
    prefills = []
    for number, prompt in enumerate(PROMPTS):
        driver.add(number, prompt, num_tokens_to_generate=4)
        prefills.append(len(seen[0]))
        driver.run()
    records = [driver.records[number] for number in range(len(PROMPTS))]
    return Outputs(
        layers=[torch.cat([outputs[step] for step in prefills]) for outputs in seen],
        log_probs=torch.tensor([value for record in records for value in record.prompt_log_probs]),
        tokens=[record.generated_tokens for record in records],
    )


def observe_share(wholes: Mapping[str, Whole]) -> dict[str, dict[str, Outputs]]:
    """Observe one rank of two: in bf16, and in bf16 with coarser partial products."""
    platform.initialize(ParallelConfig(tensor_model_parallel_size=2))
    usual = RowLinear.forward
    forwards = {"bf16": usual, "six bits": sum_with_six_bits}
    found: dict[str, dict[str, Outputs]] = {name: {} for name in MODELS}
    for kind, forward in forwards.items():
        RowLinear.forward = forward
        for name, config in MODELS.items():
            found[name][kind] = observe(config, wholes[name], torch.bfloat16)
    return found


@dataclass
class Found:
    """Outputs of one rank in fp32 and bf16, and of each of two ranks, by the names of `observe_share`."""

    exact: Outputs
    one_rank: Outputs
    ranks: list[dict[str, Outputs]]


@pytest.fixture(scope="module")
def outputs() -> dict[str, Found]:
    wholes = {name: in_bf16(whole_parameters(build_slow_decay(config))) for name, config in MODELS.items()}
    ranks = run_ranks(observe_share, 2, wholes, deadline=240.0)
    return {
        name: Found(
            observe(config, wholes[name], torch.float32),
            observe(config, wholes[name], torch.bfloat16),
            [rank[name] for rank in ranks],
        )
        for name, config in MODELS.items()
    }


def in_bf16(whole: Whole) -> Whole:
    """Round all weights to bf16, except those that a bf16 model keeps in fp32."""
    return {
        key: tensor if key.rpartition(".")[2] in KEPT_IN_FP32 else tensor.to(torch.bfloat16)
        for key, tensor in whole.items()
    }


def distances(actual: Outputs, expected: Outputs) -> list[float]:
    """Root mean squares of the differences of each layer's output, and mean difference of log-probs."""
    pairs = zip(actual.layers, expected.layers, strict=True)
    layers = [float((a - b).square().mean().sqrt()) for a, b in pairs]
    return [*layers, float((actual.log_probs - expected.log_probs).abs().mean())]


def factors(actual: Outputs, found: Found) -> list[float]:
    """Distances from the exact outputs as multiples of one rank's."""
    own, one_rank = distances(actual, found.exact), distances(found.one_rank, found.exact)
    return [a / b for a, b in zip(own, one_rank, strict=True)]


@pytest.mark.parametrize("name", MODELS)
class TestRounding:
    def test_error_in_bf16_is_within_the_bound(self, name, outputs):
        found = outputs[name]
        assert max(factors(found.ranks[0]["bf16"], found)) < LARGEST_FACTOR

    def test_bound_finds_coarser_partial_products(self, name, outputs):
        found = outputs[name]
        assert max(factors(found.ranks[0]["six bits"], found)) > LARGEST_FACTOR

    def test_both_ranks_compute_the_same(self, name, outputs):
        first, second = (rank["bf16"] for rank in outputs[name].ranks)
        assert first.tokens == second.tokens
        assert all(torch.equal(a, b) for a, b in zip(first.layers, second.layers, strict=True))
