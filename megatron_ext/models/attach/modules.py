"""Check of a Megatron model in memory: wrappers and modules that are known to compute the same as ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import nn

from megatron_ext.errors import ConfigError
from megatron_ext.mcore.layers.residual_layers import forward_hooks
from megatron_ext.models.weight_files import is_prediction

# Classes whose `module` is the wrapped model, and whose forward computes the same.
_WRAPPERS = frozenset(("DistributedDataParallel", "Float16Module"))
_GPT = "GPTModel"
_MODELS = (_GPT, "MambaModel", "HybridModel")


def class_path(module: object) -> str:
    """Return module and name of an object's class."""
    kind = type(module)
    return f"{kind.__module__}.{kind.__qualname__}"


def is_upstreams(module: object) -> bool:
    """Return whether an object's class is one of megatron-core."""
    return type(module).__module__.startswith("megatron.core.")


def is_gpt(model: nn.Module) -> bool:
    """Return whether an unwrapped model is a GPT, each of whose layers is two of ours."""
    return type(model).__name__ == _GPT


def unwrapped(model: object) -> nn.Module:
    """Return the model inside `Float16Module` and `DistributedDataParallel`.

    Args:
        model: A model, bare or wrapped, or the list of one that Megatron's training has.

    Raises:
        ConfigError: Another wrapper or one with hooks, another model, or several chunks of a virtual pipeline.
    """
    if isinstance(model, Sequence | nn.ModuleList) and not isinstance(model, str):
        if len(model) != 1:
            raise ConfigError(
                f"the model is a list of {len(model)} chunks of a virtual pipeline, which is not supported; "
                "train with one chunk on each stage"
            )
        model = model[0]
    while isinstance(model, nn.Module) and type(model).__name__ in _WRAPPERS:
        if forward_hooks(model):
            raise ConfigError(
                f"the model is in a {type(model).__name__} with forward hooks, which the engine would not call; remove "
                "them"
            )
        model = model.module
    if not isinstance(model, nn.Module) or not is_upstreams(model) or type(model).__name__ not in _MODELS:
        raise ConfigError(
            f"the model is of class {class_path(model)}; supported are {', '.join(_MODELS)} of megatron.core, bare or "
            f"in {' and '.join(sorted(_WRAPPERS))}"
        )
    return model


# Names of megatron-core's classes, in any of its modules.
_KNOWN = frozenset(
    """
    GPTModel MambaModel HybridModel
    TransformerBlock MambaStack HybridStack
    TransformerLayer MoETransformerLayer MambaLayer MLPLayer
    LanguageModelEmbedding VocabParallelEmbedding RotaryEmbedding YarnRotaryEmbedding
    SelfAttention DotProductAttention FusedScaleMaskSoftmax IdentityOp IdentityFuncOp
    ColumnParallelLinear RowParallelLinear MLP
    MoELayer TopKRouter SequentialMLP SharedExpertMLP TEGroupedMLP
    MambaMixer ExtendedRMSNorm GatedDeltaNet
    FusedLayerNorm WrappedTorchNorm
    TENorm TEDotProductAttention TELinear TEColumnParallelLinear TERowParallelLinear TELayerNormColumnParallelLinear
    TEColumnParallelGroupedLinear TERowParallelGroupedLinear
    """.split()
)
_TORCHS = frozenset((nn.ModuleList, nn.Dropout, nn.Embedding, nn.LayerNorm, nn.RMSNorm, nn.Conv1d, nn.SiLU))
_TRANSFORMER_ENGINE = "transformer_engine."  # its own classes, inside of those above
# Attributes of known classes, and the only values that are supported.
_VALUES: Mapping[str, Mapping[str, object]] = {
    "MambaMixer": {
        "rmsnorm": True,
        "norm_before_gate": False,
        "D_has_hdim": False,
        "d_conv": 4,
        "activation": "silu",
    },
    "RotaryEmbedding": {"rotary_interleaved": False, "seq_len_interpolation_factor": None},
    "YarnRotaryEmbedding": {"rotary_interleaved": False, "seq_len_interpolation_factor": None},
    "SelfAttention": {"attention_type": "self"},
    "GatedDeltaNet": {"use_qk_l2norm": True, "activation": "silu"},
}
_RESIDUAL_SUMS = ("self_attn_bda", "mlp_bda", "mamba_bda", "cross_attn_bda")
_SUM_NAMES = ("get_bias_dropout_add", "IdentityFuncOp")


def check_modules(model: nn.Module) -> None:
    """Check that every module of an unwrapped model can be computed by ours, apart from drafting layers.

    Raises:
        ConfigError: A module is of an unknown class, has a forward of its own, a hook on its forward, or a setting that
            is not supported; the message names it.
    """
    for name, module in model.named_modules():
        if is_prediction(f"{name}."):
            continue
        for problem in _problems(module):
            raise ConfigError(f"{name or 'the model'} {problem}; such a model cannot be attached")


def _problems(module: nn.Module) -> Iterator[str]:
    kind = type(module)
    is_libraries = kind in _TORCHS or kind.__module__.startswith(_TRANSFORMER_ENGINE)
    if not (is_libraries or (is_upstreams(module) and kind.__name__ in _KNOWN)):
        yield f"is of class {class_path(module)}, whose computation is not known"
    for attribute, value in vars(module).items():
        if callable(value) and callable(getattr(kind, attribute, None)):
            yield f"has a {attribute} of its own in place of its class's"
    for hook in forward_hooks(module):
        yield f"has the forward hook {_name_of(hook)}, which the engine would not call{_remedy(hook)}"
    for attribute, supported in _VALUES.get(kind.__name__, {}).items():
        found = getattr(module, attribute, supported)
        if found != supported:
            yield f"has {attribute} = {found!r}, where {supported!r} is supported"
    mask = getattr(module, "attn_mask_type", None)
    if kind.__name__ == "SelfAttention" and getattr(mask, "name", None) != "causal":
        yield f"has attn_mask_type = {mask}, where causal is supported"
    for attribute in _RESIDUAL_SUMS:
        found = getattr(module, attribute, None)
        if found is not None and getattr(found, "__name__", type(found).__name__) not in _SUM_NAMES:
            yield f"has {attribute} = {_name_of(found)}, where {_SUM_NAMES[0]} is supported"


def _name_of(function: Callable[..., object]) -> str:
    return str(getattr(function, "__qualname__", repr(function)))


def _remedy(hook: Callable[..., object]) -> str:
    is_of_wrapper = "DistributedDataParallel" in _name_of(hook)
    return " (call disable_forward_pre_hook() of the wrapper while requests are served)" if is_of_wrapper else ""
