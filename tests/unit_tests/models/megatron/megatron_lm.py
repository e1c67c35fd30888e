"""Checkpoints as Megatron-LM leaves them on disk, written from a model of ours or from upstream's GPT.

The keys and the cuts are spelled out here once more, so that they do not follow the code which they test.
"""

from __future__ import annotations

import dataclasses
import io
import pickle
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from megatron_ext.config import ModelConfig
from megatron_ext.mcore import platform
from megatron_ext.mcore.checkpoint.checkpoint_files import write_state
from megatron_ext.models.build import transformer_config

GPT = ModelConfig(
    hybrid_override_pattern="*-*-*-",
    hidden_size=32,
    ffn_hidden_size=48,
    num_attention_heads=4,
    num_query_groups=2,
    position_embedding_type="rope",
    max_position_embeddings=64,
    vocab_size=50,
)
FUSED = {
    "M": ("norm.", "mixer.in_proj.layer_norm_"),
    "*": ("input_layernorm.", "self_attention.linear_qkv.layer_norm_"),
    "-": ("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"),
}


def arguments(config: ModelConfig, **changes: object) -> Namespace:
    """Arguments that Megatron-LM saves: few of its thousand, including some that do not concern the model."""
    values = {
        "num_layers": config.layer_count,
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": config.ffn_size,
        "num_attention_heads": config.num_attention_heads,
        "group_query_attention": config.query_groups != config.num_attention_heads,
        "num_query_groups": config.query_groups if config.query_groups != config.num_attention_heads else 1,
        "kv_channels": config.head_channels,
        "hybrid_override_pattern": config.hybrid_override_pattern,
        "hybrid_attention_ratio": 0.0,
        "hybrid_mlp_ratio": 0.0,
        "is_hybrid_model": True,
        "spec": ["megatron.core.models.mamba.mamba_layer_specs", "mamba_stack_spec"],
        "mamba_state_dim": config.mamba_state_dim,
        "mamba_head_dim": config.mamba_head_dim,
        "mamba_num_groups": config.mamba_num_groups,
        "mamba_num_heads": config.mamba_num_heads,
        "position_embedding_type": config.position_embedding_type,
        "rotary_base": config.rotary_base,
        "rotary_percent": config.rotary_percent,
        "rotary_interleaved": False,
        "normalization": config.normalization,
        "norm_epsilon": config.norm_epsilon,
        "apply_layernorm_1p": False,
        "squared_relu": config.squared_relu,
        "swiglu": config.swiglu,
        "add_bias_linear": not config.disable_bias_linear,
        "add_qkv_bias": config.add_qkv_bias,
        "untie_embeddings_and_output_weights": config.untie_embeddings_and_output_weights,
        "max_position_embeddings": config.max_position_embeddings,
        "padded_vocab_size": config.vocab_size,
        "make_vocab_size_divisible_by": 8,
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "num_experts": None,
        "params_dtype": torch.bfloat16,
        "model_type": ModelType.encoder_or_decoder,
        "lr": 3e-4,
        "data_path": ["corpus_text_document"],
        "tokenizer_type": "GPT2BPETokenizer",
        "transformer_impl": "transformer_engine",
    }
    return Namespace(**(values | changes))


def gpt_model(config: ModelConfig) -> GPTModel:
    """Upstream's own model, of upstream's own layers."""
    platform.initialize()
    torch.manual_seed(9)
    model = GPTModel(
        dataclasses.replace(transformer_config(config, torch.float32), num_layers=config.layer_count // 2),
        get_gpt_layer_local_spec(normalization=config.normalization),
        config.vocab_size,
        config.max_position_embeddings,
        position_embedding_type=config.position_embedding_type,
        rotary_percent=config.rotary_percent,
        rotary_base=config.rotary_base,
        share_embeddings_and_output_weights=not config.untie_embeddings_and_output_weights,
    )
    return perturbed(model.eval())


def gpt_arguments(config: ModelConfig, **changes: object) -> Namespace:
    hybrid = {"num_layers": config.layer_count // 2, "hybrid_override_pattern": None, "spec": None}
    return arguments(config, **(hybrid | {"is_hybrid_model": False} | changes))


def perturbed(model: nn.Module) -> nn.Module:
    """Norms that are not ones and biases that are not zeros, so that a lost one is seen."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model


def stored_tensors(model: nn.Module, config: ModelConfig, *, fused: bool = True) -> dict[str, Tensor]:
    """The tensors of a hybrid model under Megatron's keys: norms fused as in TE specs, or on their own."""
    inner, channels = config.mamba_heads * config.mamba_head_dim, config.mamba_num_groups * config.mamba_state_dim
    xbc = {"x": inner, "B": channels, "C": channels}
    cuts = {"in_proj.weight": {"z": inner, **xbc, "dt": config.mamba_heads}, "conv1d.weight": xbc, "conv1d.bias": xbc}
    stored = {}
    for name, tensor in model.named_parameters():
        key, value = _fused_key(name, config) if fused else name, tensor.detach().clone()
        sections = next((cuts[end] for end in cuts if key.endswith(f"mixer.{end}")), None)
        if sections is None:
            stored[key] = value
        else:
            parts = value.split(list(sections.values()))
            stored |= {f"{key}.{section}": part for section, part in zip(sections, parts, strict=True)}
    return stored


def training_state(tensors: Mapping[str, Tensor]) -> dict:
    """Training state that a run saves beside the model."""
    moments = {f"optimizer.state.exp_avg.{key}": torch.zeros_like(value) for key, value in tensors.items()}
    moments |= {f"chained_0.{key}": value for key, value in moments.items()}
    objects = {"rng_state": [1, 2], "rerun_state_machine_state": {"mode": 1}}
    objects |= {f"decoder.layers.{number}.mixer.in_proj._extra_state": None for number in range(2)}
    return {
        "optimizer": {"param_groups": [{"lr": 3e-4, "step": 100}], "state": _sharded(moments)},
        "opt_param_scheduler": {"max_lr": 3e-4},
        "objects": {key: ShardedObject(key, value, (1,), (0,)) for key, value in objects.items()},
    }


def write(directory: Path, tensors: Mapping[str, Tensor], args: object, **more: object) -> Path:
    """Write `directory/iter_0000100` and say in `directory` that it is the latest; returns `directory`."""
    iteration = directory / "iter_0000100"
    write_files(iteration, tensors, {"args": args, "checkpoint_version": 3.0, "iteration": 100, **more})
    (directory / "latest_checkpointed_iteration.txt").write_text("100")
    return directory


def write_files(directory: Path, tensors: Mapping[str, Tensor], common: Mapping[str, object]) -> None:
    """Write megatron's files."""
    directory.mkdir(parents=True, exist_ok=True)
    write_state({**common, "model": _sharded(tensors)}, directory)


def as_later_versions_write(directory: Path, content: bytes | None = None) -> None:
    """Move the common state of a checkpoint to where megatron-core 0.19 has it: an object in a `.distcp` file.

    Args:
        directory: Directory of megatron's files.
        content: Content of the object; the default is the list of one dictionary that 0.19 pickles.
    """
    if content is None:
        stored = io.BytesIO()
        torch.save([torch.load(directory / "common.pt", weights_only=False)], stored)
        content = stored.getvalue()
    (directory / "common.pt").unlink()
    file = directory / "__0_0.distcp"
    before = file.read_bytes()
    file.write_bytes(before + content)
    metadata, key = pickle.loads((directory / ".metadata").read_bytes()), "common_state/shard_0_1"
    metadata.state_dict_metadata[key] = BytesStorageMetadata()
    metadata.storage_data[MetadataIndex(key)] = _StorageInfo(file.name, len(before), len(content))
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))


def read_tensors(directory: Path) -> dict[str, Tensor]:
    """All tensors by key."""
    return {
        key: value
        for key, value in dist_checkpointing.load_plain_tensors(str(directory)).items()
        if isinstance(value, Tensor)
    }


def edit_tensors(directory: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Change tensors of a checkpoint in place; its common state is lost."""
    tensors = read_tensors(directory)
    change(tensors)
    for path in (*directory.glob("*.distcp"), directory / ".metadata", directory / "common.pt"):
        path.unlink()
    write_files(directory, tensors, {})


def _fused_key(name: str, config: ModelConfig) -> str:
    if not name.startswith("decoder.layers."):
        return name
    number, rest = name.removeprefix("decoder.layers.").split(".", 1)
    alone, fused = FUSED[config.hybrid_override_pattern[int(number)]]
    return f"decoder.layers.{number}." + (fused + rest.removeprefix(alone) if rest.startswith(alone) else rest)


def _sharded(tensors: Mapping[str, Tensor]) -> dict[str, ShardedTensor]:
    return {key: ShardedTensor.from_rank_offsets(key, value.contiguous()) for key, value in tensors.items()}
