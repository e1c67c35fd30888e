"""Models at several layouts: what a rank of each loads, and what the ranks together compute."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from megatron.core.ssm.mamba_block import MambaStack
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

from megatron_ext.config import ModelConfig, ParallelConfig, SourceConfig
from megatron_ext.mcore import platform
from megatron_ext.mcore.checkpoint.weight_shards import model_shards, model_tensors
from megatron_ext.mcore.layers.hybrid_model import HybridModel
from megatron_ext.models.build import build_model
from megatron_ext.models.load import load_model

CPU = torch.device("cpu")
VOCABULARY_TABLES = ("embedding.word_embeddings.weight", "output_layer.weight")

HYBRID = ModelConfig(
    hybrid_override_pattern="M*-M*",  # five layers: stages of three and two
    hidden_size=48,
    ffn_hidden_size=64,
    swiglu=True,
    num_attention_heads=4,
    num_query_groups=2,
    position_embedding_type="rope",
    mamba_state_dim=16,
    mamba_head_dim=12,
    mamba_num_heads=4,
    mamba_num_groups=2,
    mamba_chunk_size=32,
    vocab_size=96,
)
_EXPERTS = {"hybrid_override_pattern": "M*EME", "num_experts": 4, "moe_ffn_hidden_size": 24, "swiglu": True}
_PREDICTION = {"mtp_hybrid_override_pattern": "M*-"}
CONFIGS = {
    "mamba2": HYBRID,
    "odd vocabulary": dataclasses.replace(HYBRID, vocab_size=97),
    "untied": dataclasses.replace(
        HYBRID, vocab_size=97, untie_embeddings_and_output_weights=True, swiglu=False, squared_relu=True
    ),
    "prediction": dataclasses.replace(
        HYBRID, vocab_size=97, untie_embeddings_and_output_weights=True, mtp_num_layers=2, **_PREDICTION
    ),
    "prediction_positions": dataclasses.replace(
        HYBRID, position_embedding_type="learned_absolute", mtp_num_layers=1, **_PREDICTION
    ),
    "biases": dataclasses.replace(
        HYBRID, disable_bias_linear=False, normalization="LayerNorm", position_embedding_type="learned_absolute"
    ),
    "mamba1": dataclasses.replace(
        HYBRID, recurrent_layer="mamba1", mamba_state_dim=8, mamba_dt_rank=5, mamba_inner_norm="weighted"
    ),
    "gated_delta_net": dataclasses.replace(
        HYBRID,
        recurrent_layer="gated_delta_net",
        linear_key_head_dim=8,
        linear_value_head_dim=12,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        attention_output_gate=True,
        qk_layernorm=True,
    ),
    "experts": dataclasses.replace(HYBRID, **_EXPERTS),
    "latent_experts": dataclasses.replace(
        HYBRID,
        **_EXPERTS,
        moe_latent_size=16,
        moe_shared_expert_intermediate_size=20,
        moe_shared_expert_gate=True,
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
    ),
}


# Stages of a stack that is not ours are those of megatron-core.
foreign_spec = ModuleSpec(module=MambaStack)


def sizes(tp: int = 1, pp: int = 1, ep: int = 1, etp: int | None = None, first: int | None = None) -> ParallelConfig:
    """Sizes by their usual abbreviations."""
    return ParallelConfig(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
        num_layers_in_first_pipeline_stage=first,
    )


def perturbed_model(config: ModelConfig, seed: int = 3) -> HybridModel:
    """A model of one rank in which no two numbers are equal: what is initialised to ones would not be missed."""
    model = build_model(config, device=CPU, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in model_tensors(model).values():
            tensor += 0.1 * torch.randn(tensor.shape, generator=generator)
    return model


@dataclass(frozen=True)
class Part:
    """Tensors of a rank, their places in the whole model, and the output, which only the last stage has."""

    tensors: dict[str, Tensor]
    where: dict[str, tuple[str, tuple[tuple[slice, slice], ...]]]
    logits: Tensor | None


def load(directory: Path, parallel: ParallelConfig, *, is_hf: bool = False) -> HybridModel:
    """Load this rank's part of a stored model."""
    platform.initialize(parallel)
    source = SourceConfig(load_hf=str(directory)) if is_hf else SourceConfig(load=str(directory))
    loaded = load_model(source, {"spec": None}, parallel=parallel, device=CPU, reads_prediction=True)
    assert isinstance(loaded.model, HybridModel)
    return loaded.model


def random_model(config: ModelConfig, parallel: ParallelConfig) -> HybridModel:
    """Build this rank's part of a model of random weights."""
    platform.initialize(parallel)
    return build_model(config, parallel=parallel, device=CPU, seed=5)


def held(model: HybridModel) -> dict[str, Tensor]:
    """Tensors of this rank, by their local names."""
    return {name: tensor.detach().clone() for name, tensor in model_tensors(model).items()}


def places(model: HybridModel) -> dict[str, tuple[str, tuple[tuple[slice, slice], ...]]]:
    """Global tensor name of each local name, and pairs of boxes: of the whole, and of this rank's."""
    return {
        name: (cut.name, tuple((piece.whole, piece.local) for piece in cut.pieces))
        for name, cut in model_shards(model).items()
    }


def matrices(model: HybridModel) -> int:
    """Number of values in this rank's matrices."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.dim() > 1)


@torch.inference_mode()
def logits(model: HybridModel, tokens: list[int]) -> Tensor | None:
    """Logits of a sequence, [T, V], computed by the ranks without an engine; None on all but the last stage."""
    group, stage = model.pp_group, model.pp_group.rank()
    neighbours = torch.distributed.get_process_group_ranks(group)
    hidden_size = model.config.hidden_size
    if stage > 0:
        received = torch.empty(len(tokens), 1, hidden_size)
        torch.distributed.recv(received, neighbours[stage - 1], group=group)
        model.set_input_tensor(received)
    ids = torch.tensor([tokens])
    # [1, T, V], or [T, 1, h] between stages
    output = model(ids, torch.arange(len(tokens))[None], None, runtime_gather_output=True)
    if not model.post_process:
        torch.distributed.send(output.contiguous(), neighbours[stage + 1], group=group)
        return None
    return output[0]


def part_of(model: HybridModel, tokens: list[int] | None = None) -> Part:
    """Part that this rank has; with tokens, its output too."""
    return Part(held(model), places(model), None if tokens is None else logits(model, tokens))


def assert_parts_of(whole: dict[str, Tensor], parts: Sequence[Part]) -> None:
    """Bitwise, and every number of the whole is on some rank."""
    missing = {name: torch.ones(tensor.shape, dtype=torch.bool) for name, tensor in whole.items()}
    for part in parts:
        assert part.tensors.keys() == part.where.keys()
        for name, (whole_name, boxes) in part.where.items():
            own = part.tensors[name]
            filled = torch.zeros(own.shape, dtype=torch.bool)
            for box, local in boxes:
                assert torch.equal(whole[whole_name][box], own[local]), (name, box)
                missing[whole_name][box] = False
                filled[local] = True
            assert filled.all() or name in VOCABULARY_TABLES, name
            assert not own[~filled].any(), f"{name} has padding that is not zero"
    assert not any(mask.any() for mask in missing.values()), [name for name, mask in missing.items() if mask.any()]
