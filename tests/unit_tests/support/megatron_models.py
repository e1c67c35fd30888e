"""Models of megatron-core in memory, built by upstream's local specs, and tokens by their own forward.

Neither CUDA, Transformer Engine nor mamba-ssm is needed: `stand_ins` replaces the functions that upstream takes from
there by plain sequential ones, none of them of this package.
"""

from __future__ import annotations

import contextlib
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_ext.mcore import platform  # first: it puts the CPU stand-ins in place

from megatron.core import activations, parallel_state  # isort: skip
from megatron.core.fusions import fused_softmax  # isort: skip
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add  # isort: skip
from megatron.core.models.gpt import GPTModel  # isort: skip
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec  # isort: skip
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec  # isort: skip
from megatron.core.ssm import mamba_mixer  # isort: skip
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules  # isort: skip
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules  # isort: skip
from megatron.core.ssm.mlp_layer import MLPLayer  # isort: skip
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear  # isort: skip
from megatron.core.transformer import TransformerConfig  # isort: skip
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules  # isort: skip
from megatron.core.transformer.dot_product_attention import DotProductAttention  # isort: skip
from megatron.core.transformer.enums import AttnMaskType  # isort: skip
from megatron.core.transformer.identity_op import IdentityOp  # isort: skip
from megatron.core.transformer.mlp import MLP, MLPSubmodules  # isort: skip
from megatron.core.transformer.moe.router import TopKRouter  # isort: skip
from megatron.core.transformer.spec_utils import ModuleSpec  # isort: skip
from megatron.core.transformer.torch_norm import WrappedTorchNorm  # isort: skip
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules  # isort: skip

from tests.unit_tests.support import fused_layers  # isort: skip

try:
    from megatron.core.models.hybrid import hybrid_block
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    HybridStack, HybridSubmodules = hybrid_block.HybridStack, hybrid_block.HybridStackSubmodules
    PATTERN = "hybrid_layer_pattern"
except ImportError:  # before 0.18
    from megatron.core.models.mamba import MambaModel as HybridModel
    from megatron.core.ssm import mamba_block as hybrid_block

    HybridStack, HybridSubmodules = hybrid_block.MambaStack, hybrid_block.MambaStackSubmodules
    PATTERN = "hybrid_override_pattern"

VOCABULARY, MAX_LENGTH = 56, 256
ATOL = RTOL = 1e-4  # tests/requirements.md
PROMPT = [int(token) for token in torch.randint(0, VOCABULARY, (45,), generator=torch.Generator().manual_seed(3))]
SIZES = {
    "num_layers": 4,
    "hidden_size": 32,
    "ffn_hidden_size": 48,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "gated_linear_unit": True,
    "activation_func": F.silu,
}
MAMBA = {
    "mamba_state_dim": 16,
    "mamba_head_dim": 16,
    "mamba_num_groups": 2,
    "is_hybrid_model": True,
    "use_mamba_mem_eff_path": False,
}
EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 24,
    "moe_router_load_balancing_type": "none",
}
SIGMOID = {
    "moe_shared_expert_intermediate_size": 24,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_topk_scaling_factor": 1.5,
}


@dataclass(frozen=True)
class Kind:
    """Kind of model.

    Attributes:
        fields: Fields of `TransformerConfig` over `SIZES`.
        options: Arguments of the model.
        pattern: Pattern of a hybrid; None for a GPT.
        arguments: Arguments that Megatron-LM saves for it, where their names or values are other ones.
        later: Fields that upstream's configuration gets after its checks.
    """

    fields: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    pattern: str | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    later: dict[str, Any] = field(default_factory=dict)


UNTIED = {"share_embeddings_and_output_weights": False}
TIED = {"share_embeddings_and_output_weights": True}
ROPE = {"position_embedding_type": "rope"}
_YARN = {
    "yarn_rotary_scaling_factor": 4.0,
    "yarn_original_max_position_embeddings": 16,
    "yarn_beta_fast": 8.0,
    "yarn_beta_slow": 2.0,
    "yarn_mscale": 1.0,
    "yarn_mscale_all_dim": 0.0,
    "yarn_correction_range_round_to_int": False,
}
KINDS = {
    "llama": Kind(options={**ROPE, **UNTIED}),
    "llama 3.1": Kind(
        {"qk_layernorm": True, "add_qkv_bias": True, "kv_channels": 16},
        {**ROPE, **TIED, "rotary_base": 500000, "rope_scaling": True, "rope_scaling_factor": 4.0},
        arguments={"use_rope_scaling": True, "rope_scaling_factor": 4.0, "rotary_base": 500000},
    ),
    "gpt2": Kind(
        {"normalization": "LayerNorm", "add_bias_linear": True, "gated_linear_unit": False, "activation_func": F.gelu},
        {"position_embedding_type": "learned_absolute", **TIED},
        arguments={"swiglu": False},
    ),
    "nemotron": Kind(
        {"gated_linear_unit": False, "activation_func": "squared_relu", "layernorm_epsilon": 1e-6},
        {**ROPE, **TIED, "rotary_percent": 0.5, "rotary_base": 5000},
        arguments={"swiglu": False, "squared_relu": True, "rotary_percent": 0.5, "rotary_base": 5000},
    ),
    "softmax scale": Kind({"softmax_scale": 0.9, "num_layers": 2}, {**ROPE, **TIED}),
    "experts": Kind({**EXPERTS, **SIGMOID, "moe_layer_freq": [0, 1, 1, 0]}, {**ROPE, **UNTIED}),
    "gpt-oss": Kind(
        {
            **EXPERTS,
            "activation_func": "quick_gelu",
            "activation_func_clamp_value": 0.6,
            "glu_linear_offset": 1.0,
            "softmax_type": "learnable",
            "add_bias_linear": True,
            "window_size": (11, 0),
            "window_attn_skip_freq": 2,
        },
        {"position_embedding_type": "yarn", **TIED},
        arguments={"swiglu": False, "quick_geglu": True, "rotary_scaling_factor": 4.0, **_YARN},
        later=_YARN,
    ),
    "hybrid": Kind(MAMBA, {**UNTIED, "position_embedding_type": "none"}, "M-M*-M"),
    "hybrid, tied, rope": Kind(
        {**MAMBA, "mamba_num_heads": 6, "gated_linear_unit": False, "activation_func": "squared_relu"},
        {**TIED, **ROPE, "rotary_base": 20000},
        "M*-M*-",
        arguments={"swiglu": False, "squared_relu": True, "rotary_base": 20000, "mamba_num_heads": 6},
    ),
    "hybrid, experts": Kind({**MAMBA, **EXPERTS, **SIGMOID}, {**UNTIED, "position_embedding_type": "none"}, "ME*EM"),
}
STORED = [name for name, kind in KINDS.items() if "softmax_scale" not in kind.fields]
"""Kinds whose checkpoints say all about them."""


class ExtendedRMSNorm(nn.Module):
    """Gated norm of mamba-ssm in plain torch: the gate comes before the norm, which is over groups of channels."""

    def __init__(self, size: int, eps: float, group_size: int, norm_before_gate: bool, device: Any, dtype: Any) -> None:
        super().__init__()
        assert not norm_before_gate
        self.weight = nn.Parameter(torch.ones(size, dtype=dtype))
        self.eps, self.group_size = eps, group_size

    def forward(self, y: Tensor, gate: Tensor) -> Tensor:
        gated = (y.float() * F.silu(gate.float())).unflatten(-1, (-1, self.group_size))
        normed = gated * torch.rsqrt(gated.square().mean(-1, keepdim=True) + self.eps)
        return (normed.flatten(-2) * self.weight.float()).to(y.dtype)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

        state = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(state, prefix, {"weight": 0}, sharded_offsets)


ExtendedRMSNorm.__module__ = mamba_mixer.__name__  # an engine knows upstream's classes by their names


def sequential_scan(
    x: Tensor, dt: Tensor, decay: Tensor, b: Tensor, c: Tensor, chunk: int, *, D: Tensor, dt_bias: Tensor, **_: object
) -> Tensor:
    """SSD token by token: x [B, T, H, P], dt [B, T, H], b and c [B, T, G, N] -> y [B, T, H, P]."""
    heads = x.shape[2]
    dt = F.softplus(dt.float() + dt_bias)
    b, c = (one.float().repeat_interleave(heads // one.shape[2], 2) for one in (b, c))
    state, outputs = torch.zeros(x.shape[0], heads, x.shape[3], b.shape[3]), []
    for t in range(x.shape[1]):
        step = dt[:, t, :, None, None]
        state = state * torch.exp(step * decay[None, :, None, None]) + step * (
            x[:, t].float()[..., None] * b[:, t, :, None]
        )
        outputs.append((state * c[:, t, :, None]).sum(-1) + D.float()[:, None] * x[:, t].float())
    return torch.stack(outputs, 1).to(x.dtype)


def windowed_mask(queries: int, keys: int, window: tuple[int, int]) -> Tensor:
    """Upstream's mask, True where a key is hidden, on the CPU."""
    behind = torch.arange(queries)[:, None] + keys - queries - torch.arange(keys)
    return (behind < 0) | (behind > window[0])


def squared_relu(x: Tensor) -> Tensor:
    """Square of ReLU; upstream's is under `torch.compile`, which takes minutes."""
    return F.relu(x).square()


def quick_gelu(x: Tensor) -> Tensor:
    """Approximation of GELU by a sigmoid; upstream's is under `torch.compile`."""
    return x * torch.sigmoid(1.702 * x)


def gating(router: TopKRouter, hidden: Tensor) -> Tensor:
    """Product of the router; upstream's needs Transformer Engine, or a CUDA device."""
    return F.linear(hidden, router.weight, router.bias)


def count_nothing(router: TopKRouter, *_: object, **__: object) -> None:
    """Count no tokens: upstream's counter is under `torch.compile`, and only training reads it."""


@contextlib.contextmanager
def stand_ins() -> Iterator[None]:
    """Let upstream's layers be built and run on the CPU, without mamba-ssm and causal-conv1d."""
    with contextlib.ExitStack() as patches:

        def patch(owner: object, name: str, value: object) -> None:
            patches.enter_context(mock.patch.object(owner, name, value, create=True))

        patch(mamba_mixer, "HAVE_MAMBA_SSM", True)
        patch(mamba_mixer, "ExtendedRMSNorm", ExtendedRMSNorm)
        patch(mamba_mixer, "causal_conv1d_fn", None)  # upstream's own fallback is torch's convolution
        patch(mamba_mixer, "mamba_chunk_scan_combined", sequential_scan)
        patch(activations, "squared_relu", squared_relu)
        patch(activations, "quick_gelu", quick_gelu)
        patch(Tensor, "cuda", lambda tensor: tensor)  # of tied embeddings of stages
        patch(hybrid_block, "TENorm", WrappedTorchNorm)
        patch(fused_softmax, "get_sliding_window_causal_mask", windowed_mask)
        patch(TopKRouter, "gating", gating)
        if hasattr(TopKRouter, "_apply_expert_bias"):
            patch(TopKRouter, "_apply_expert_bias", count_nothing)
        yield


def build(
    name: str, *, seed: int = 1, model: dict[str, Any] | None = None, fused: bool = False, **fields: Any
) -> nn.Module:
    """Build this rank's part of a model of upstream, in eval mode, with lively random weights.

    Args:
        name: One of `KINDS`.
        seed: Seed of the weights, the same on every layout.
        model: More arguments of the model.
        fused: Whether layers are stand-ins of Transformer Engine's, with its parameters.
        fields: More fields of its configuration.
    """
    platform.initialize()
    kind = KINDS[name]
    sizes = {
        **({"num_layers": len(kind.pattern)} if kind.pattern else {}),
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
        "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
        "pipeline_dtype": torch.float32,
        "use_cpu_initialization": True,
        "bias_dropout_fusion": False,
        "perform_initialization": False,
    }
    values = {**SIZES, **sizes, **kind.fields, **fields}
    if isinstance(values["activation_func"], str):  # its stand-in, while there is one
        values["activation_func"] = getattr(activations, values["activation_func"])
    config = TransformerConfig(**values)
    for key, value in kind.later.items():
        setattr(config, key, value)
    options = {
        "pre_process": parallel_state.is_pipeline_first_stage(),
        "post_process": parallel_state.is_pipeline_last_stage(),
        **kind.options,
        **(model or {}),
    }
    made = (
        GPTModel(config, _gpt_spec(config, fused), VOCABULARY, MAX_LENGTH, **options)
        if kind.pattern is None
        else HybridModel(
            config, _hybrid_spec(config, fused), VOCABULARY, MAX_LENGTH, **{PATTERN: kind.pattern}, **options
        )
    )
    if fused:
        for layer in modules_named(made, "MoELayer"):
            layer.experts = fused_layers.TEGroupedMLP(layer.num_local_experts, config)
    fill(made, seed)
    return made.eval()


def _gpt_spec(config: TransformerConfig, fused: bool) -> Any:
    if fused:
        parts = _parts(config, fused)
        return _layer(TransformerLayer, **parts["attention"], **parts["experts" if config.num_moe_experts else "mlp"])
    if config.num_moe_experts is not None:
        return get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization=config.normalization)
    return get_gpt_layer_local_spec(normalization=config.normalization, qk_layernorm=config.qk_layernorm)


def _hybrid_spec(config: TransformerConfig, fused: bool) -> ModuleSpec:
    parts = _parts(config, fused)
    column, row = _linears(fused)
    mixer = ModuleSpec(
        MambaMixer, params={"expand": 2, "d_conv": 4}, submodules=MambaMixerSubmodules(in_proj=column, out_proj=row)
    )
    norm = IdentityOp if fused else WrappedTorchNorm
    mamba = MambaLayerSubmodules(norm=norm, mixer=mixer, mamba_bda=get_bias_dropout_add)
    layers = {
        "mamba_layer": ModuleSpec(MambaLayer, submodules=mamba),
        "attention_layer": _layer(TransformerLayer, **parts["attention"]),
        "mlp_layer": _layer(MLPLayer, **parts["mlp"]),
        "moe_layer": _layer(TransformerLayer, **parts["experts"]),
    }
    return ModuleSpec(HybridStack, submodules=HybridSubmodules(**layers))


def _layer(module: type, **parts: Any) -> ModuleSpec:
    return ModuleSpec(module, submodules=TransformerLayerSubmodules(**parts))


def _linears(fused: bool) -> tuple[type, type]:
    if fused:
        return fused_layers.TELayerNormColumnParallelLinear, fused_layers.TERowParallelLinear
    return ColumnParallelLinear, RowParallelLinear


def _parts(config: TransformerConfig, fused: bool) -> dict[str, dict[str, Any]]:
    """Parts of layers: attention, an MLP, and experts."""
    column, row = _linears(fused)
    norm = IdentityOp if fused else WrappedTorchNorm
    attention = SelfAttentionSubmodules(
        linear_qkv=column,
        core_attention=fused_layers.TEDotProductAttention if fused else DotProductAttention,
        linear_proj=row,
    )
    mlp = ModuleSpec(MLP, submodules=MLPSubmodules(linear_fc1=column, linear_fc2=row))
    experts = get_moe_module_spec(use_te=False, num_experts=config.num_moe_experts or 4, moe_grouped_gemm=False)
    return {
        "attention": {
            "input_layernorm": norm,
            "self_attention": ModuleSpec(SelfAttention, {"attn_mask_type": AttnMaskType.causal}, attention),
            "self_attn_bda": get_bias_dropout_add,
        },
        "mlp": {"pre_mlp_layernorm": norm, "mlp": mlp, "mlp_bda": get_bias_dropout_add},
        "experts": {"pre_mlp_layernorm": WrappedTorchNorm, "mlp": experts, "mlp_bda": get_bias_dropout_add},
    }


@torch.no_grad()
def fill(model: nn.Module, seed: int) -> None:
    """Write random values that make states and norms visible; those of one tensor depend on its name only."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith("tokens_per_expert"):
            continue
        generator = torch.Generator().manual_seed(seed + sum(name.encode()))
        noise = torch.randn(tensor.shape, generator=generator)
        if tensor.dim() > 1:
            tensor.copy_(noise * tensor[0].numel() ** -0.5 * (1 if "embedding" in name else 2))
        elif name.endswith(("A_log", "dt_bias")):
            tensor.copy_(0.3 * noise - 3.0)
        else:
            tensor.copy_(0.3 * noise + ("norm" in name or name.endswith(".D")))


def logits(model: nn.Module, tokens: Sequence[int]) -> Tensor:
    """Logits [T, V] of the model's own forward."""
    length = len(tokens)
    mask = torch.ones(1, 1, length, length).triu(1).bool()
    with torch.no_grad():
        return model(torch.tensor([list(tokens)]), torch.arange(length)[None], mask)[0]


def generate(model: nn.Module, prompt: Sequence[int], count: int) -> tuple[list[int], list[float]]:
    """Greedy tokens and their log-probs, by a forward over everything for each token."""
    tokens, scores = list(prompt), []
    for _ in range(count):
        last = logits(model, tokens)[-1].float().log_softmax(-1)
        tokens.append(int(last.argmax()))
        scores.append(float(last.max()))
    return tokens[len(prompt) :], scores


def arguments(name: str) -> Namespace:
    """Arguments that Megatron-LM saves with a model."""
    kind = KINDS[name]
    values = {key: value for key, value in (SIZES | kind.fields).items() if not callable(value)}
    values |= {key: value for key, value in kind.options.items() if key.startswith(("position", "rotary"))}
    values |= {
        "swiglu": True,
        "norm_epsilon": values.pop("layernorm_epsilon", 1e-5),
        "num_experts": values.pop("num_moe_experts", None),
        "group_query_attention": True,
        "max_position_embeddings": MAX_LENGTH,
        "padded_vocab_size": VOCABULARY,
        "untie_embeddings_and_output_weights": not kind.options["share_embeddings_and_output_weights"],
        "hybrid_override_pattern": kind.pattern,
        "num_layers": len(kind.pattern) if kind.pattern else SIZES["num_layers"],
    }
    return Namespace(**(values | kind.arguments))


def modules_named(model: nn.Module, kind: str) -> list[nn.Module]:
    """Modules of a class, by its name."""
    return [module for module in model.modules() if type(module).__name__ == kind]


def snapshot(model: nn.Module) -> dict[str, Any]:
    """Everything of a model that an engine must leave alone."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_load_state_dict_post_hooks")
    return {
        "training": [module.training for module in model.modules()],
        "hooks": [(kind, list(getattr(module, kind))) for module in model.modules() for kind in hooks],
        "attributes": [sorted(vars(module)) for module in model.modules()],
        "parameters": {
            name: (id(one), one.data_ptr(), one._version, one.requires_grad, id(one.grad), sorted(vars(one)))
            for name, one in model.named_parameters()
        },
        "tensors": {name: one.clone() for name, one in model.state_dict().items() if isinstance(one, Tensor)},
    }
