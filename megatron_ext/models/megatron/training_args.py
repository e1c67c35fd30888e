"""Translation of the arguments that Megatron-LM saves with a checkpoint to our configuration.

Megatron saves every argument of the run. Arguments that change the model's computation are translated, or must have a
supported value; the others (training, data, logging, parallelism) are ignored. An argument that is absent because
Megatron was older has its former implicit value: off.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from megatron_ext.config import MAX_LAYERS, NORMALIZATIONS, POSITION_EMBEDDINGS, SOFTMAX_TYPES, ModelConfig
from megatron_ext.config.layers import (
    EVERY_LAYER,
    YARN,
    moe_letters,
    pattern_from_ratios,
    prediction_pattern,
    read_pattern,
    windowed_letters,
)
from megatron_ext.config.model import PREDICTION_LETTERS
from megatron_ext.config.source import TOKENIZER_TYPES
from megatron_ext.errors import CheckpointError, ConfigError
from megatron_ext.models.config_fields import MEGATRONS_MODULES, is_megatrons_spec
from megatron_ext.models.megatron.directory import model_config


@dataclass(frozen=True)
class TrainingFacts:
    """Facts of a model that Megatron-LM trained.

    Attributes:
        is_gpt: Whether the stored weights are a GPT's: each layer an attention and an MLP or experts.
        vocabulary_rows: Rows of the embedding, padding included.
        tokenizer_type: Tokenizer type of the run; None if absent or unknown here.
        tokenizer_model: Tokenizer file of the run, on any machine.
    """

    is_gpt: bool
    vocabulary_rows: int
    tokenizer_type: str | None = None
    tokenizer_model: Path | None = None
    vocab_file: Path | None = None
    merge_file: Path | None = None
    tiktoken_pattern: str | None = None
    tiktoken_num_special_tokens: int | None = None


def training_facts(args: object, *, is_gpt: bool, vocabulary_rows: int) -> TrainingFacts:
    """Extract the facts from the arguments in a checkpoint; values of a wrong type are ignored."""

    def text(name: str) -> str | None:
        value = getattr(args, name, None)
        return value if isinstance(value, str) and value and "\0" not in value else None

    kind, specials = text("tokenizer_type"), getattr(args, "tiktoken_num_special_tokens", None)
    files = {name: text(name) for name in ("tokenizer_model", "vocab_file", "merge_file")}
    return TrainingFacts(
        is_gpt,
        vocabulary_rows,
        tokenizer_type=kind if kind in TOKENIZER_TYPES else None,
        tiktoken_pattern=text("tiktoken_pattern"),
        tiktoken_num_special_tokens=specials if type(specials) is int else None,
        **{name: Path(file) for name, file in files.items() if file is not None},
    )


_REQUIRED = ("hidden_size", "num_attention_heads", "max_position_embeddings")
# Taken as they are, from the arguments of every model and of one with experts.
_TAKEN = tuple(
    """
    apply_layernorm_1p attention_output_gate kv_channels
    linear_conv_kernel_dim linear_key_head_dim linear_num_key_heads linear_num_value_heads linear_value_head_dim
    mamba_state_dim mamba_head_dim mamba_num_heads mamba_num_groups
    rotary_percent use_rope_scaling rope_scaling_factor
    activation_func_clamp_value glu_linear_offset quick_geglu softmax_type squared_relu swiglu
    untie_embeddings_and_output_weights
    """.split()
)
_TAKEN_FOR_EXPERTS = tuple(
    """
    num_experts moe_ffn_hidden_size moe_shared_expert_gate moe_shared_expert_intermediate_size moe_latent_size
    moe_router_topk moe_router_score_function moe_router_num_groups moe_router_group_topk moe_router_pre_softmax
    moe_router_topk_scaling_factor moe_router_enable_expert_bias
    """.split()
)
_MUST_BE_OFF = tuple(
    """
    apply_residual_connection_post_layernorm heterogeneous_layers_config_encoded_json heterogeneous_layers_config_path
    layernorm_zero_centered_gamma linear_attention_type mrope_section multi_latent_attention no_rope_freq qk_l2_norm
    retro_add_retriever rotary_interleaved use_legacy_models
    """.split()
)
# Megatron's hybrid models ignore the first; their patterns replace the others, which are for GPT.
_MUST_BE_OFF_IN_HYBRIDS = ("qk_layernorm", "window_size", "experimental_attention_variant", "linear_attention_freq")
_MUST_BE_OFF_FOR_EXPERTS = ("moe_apply_probs_on_input", "moe_expert_capacity_factor", "moe_router_force_load_balancing")
_DELTA_NET = "gated_delta_net"
_POSITIONS, _SIZE = "position_embedding_type", "window_size"
# Arguments of YaRN, which have the prefix `yarn_` in some versions of Megatron.
_YARN = tuple(
    """
    rotary_scaling_factor original_max_position_embeddings beta_fast beta_slow mscale mscale_all_dim
    correction_range_round_to_int
    """.split()
)
_ALLOWED = {
    "position_embedding_type": POSITION_EMBEDDINGS,
    "normalization": NORMALIZATIONS,
    "rope_type": ("rope",),
    "rotary_seq_len_interpolation_factor": (1,),
    "softmax_type": SOFTMAX_TYPES,
}
# Arguments that say what a model computes, under names that the model's configuration has, too.
ARGUMENTS = frozenset(
    (
        *(*_TAKEN, *_TAKEN_FOR_EXPERTS, *_MUST_BE_OFF, *_MUST_BE_OFF_IN_HYBRIDS, *_MUST_BE_OFF_FOR_EXPERTS),
        *("add_bias_linear", "add_qkv_bias", "ffn_hidden_size", "hidden_size", "layernorm_epsilon", "moe_layer_freq"),
        *("moe_router_load_balancing_type", "normalization", "num_attention_heads", "num_layers", "num_query_groups"),
        "window_attn_skip_freq",
    )
)
_LARGEST = 2**53  # the whole numbers that are exact as floats
_MAMBA_NORM_EPSILON = 1e-5  # of the gated norm inside the mixer, regardless of the arguments


def config_from_args(args: object, where: str, *, is_gpt: bool, vocab_size: int | None = None) -> ModelConfig:
    """Return the configuration of a model that Megatron-LM trained.

    Args:
        args: The namespace that Megatron saved.
        where: Source of the arguments, for messages.
        is_gpt: Whether the stored weights are a GPT model's: then each layer becomes attention and an MLP or experts.
        vocab_size: Ids to keep of the padded vocabulary; None keeps the padding, as Megatron itself does.

    Raises:
        CheckpointError: An argument is missing or has an unsupported value; the message names it.
    """
    known = _Arguments(args, where)
    _require_supported(known, is_gpt)
    pattern, recurrent_layer = _pattern(known, is_gpt)
    fields = {name: known.required(name) for name in _REQUIRED}
    fields |= known.given(_TAKEN)
    fields |= {
        "hybrid_override_pattern": pattern,
        "position_embedding_type": known.get("position_embedding_type", "learned_absolute"),
        "normalization": known.get("normalization", "LayerNorm"),
        "norm_epsilon": _norm_epsilon(known, pattern),
        "rotary_base": known.integer("rotary_base", 10000),
        "disable_bias_linear": not known.get("add_bias_linear", not known.get("disable_bias_linear", False)),
        "add_qkv_bias": bool(known.get("add_qkv_bias")),
        "num_query_groups": known.get("num_query_groups") if known.get("group_query_attention") else None,
        "vocab_size": _vocabulary(known, vocab_size),
    }
    if recurrent_layer is not None:
        fields["recurrent_layer"] = recurrent_layer
    if is_gpt:
        fields |= _positions_and_window(known)
        fields |= known.given(("qk_layernorm",))
        fields["recurrent_layer"] = known.get("experimental_attention_variant", ModelConfig.recurrent_layer)
    # Experts without a size of their own have the size of an MLP.
    if "-" in pattern or ("E" in pattern and known.get("moe_ffn_hidden_size") is None):
        fields["ffn_hidden_size"] = known.required("ffn_hidden_size")
    if "E" in pattern:
        known.require_off(_MUST_BE_OFF_FOR_EXPERTS)
        balancing = known.get("moe_router_load_balancing_type", "none")
        if type(balancing) not in (str, list) or "sinkhorn" in balancing:
            known.refuse("moe_router_load_balancing_type", "any but sinkhorn, which routes by itself")
        fields |= known.given(_TAKEN_FOR_EXPERTS)
    fields |= _prediction(known, pattern, is_gpt)
    return model_config(fields, f"the arguments in {where}")


def _prediction(known: _Arguments, pattern: str, is_gpt: bool) -> dict[str, Any]:
    """Return the fields of multi-token prediction; empty without it, or if it cannot be read.

    A layer of a GPT is like its last one. Megatron before 0.18 says a hybrid's in an argument, later in the pattern.
    """
    depths = known.get("mtp_num_layers")
    if is_gpt:
        letters = pattern[-2:]
    else:
        whole = known.get("hybrid_override_pattern") or known.get("hybrid_layer_pattern") or ""
        letters, counted = prediction_pattern(whole)
        letters, depths = letters or known.get("mtp_hybrid_override_pattern") or "", depths or counted
    if not depths or not letters or set(letters) - set(PREDICTION_LETTERS):
        return {}
    if type(depths) is not int or depths < 0:
        known.refuse("mtp_num_layers", "a number of layers")
    fields = {"mtp_num_layers": depths, "mtp_hybrid_override_pattern": letters}
    return fields | known.given(("mtp_use_repeated_layer",))


def _positions_and_window(known: _Arguments) -> dict[str, Any]:
    """Return the fields of YaRN and of a window of a GPT."""
    window = _window(known)
    fields: dict[str, Any] = {} if window is None else {"attention_window": window}
    if known.get(_POSITIONS) != YARN:
        return fields
    given = {f"yarn_{name}": known.get(f"yarn_{name}", known.get(name)) for name in _YARN}
    fields |= {name: value for name, value in given.items() if value is not None}
    return {"yarn_rotary_scaling_factor": 1.0, _POSITIONS: "rope", **fields}


def _window(known: _Arguments) -> int | None:
    """Return the number of tokens that a query sees, its own included; None for all."""
    size = known.get(_SIZE)
    if not size:
        return None
    if not isinstance(size, list | tuple) or len(size) != 2 or any(type(one) is not int for one in size):
        known.refuse(_SIZE, "a number of tokens before a query, and 0")
    before, after = size
    if before == -1:
        return None
    if before < 0 or after != 0:
        known.refuse(_SIZE, "a number of tokens before a query, and 0")
    return int(before) + 1


def padded_vocabulary(args: object, where: str) -> int:
    """Return the rows of the embedding as stored: the tokenizer's ids, rounded up for the training ranks."""
    return _Arguments(args, where).integer("padded_vocab_size")


class _Arguments:
    """Arguments that Megatron saved, by name; None counts as absent."""

    def __init__(self, args: object, where: str) -> None:
        self.where = where
        if isinstance(args, Mapping):
            args = SimpleNamespace(**args)
        if not hasattr(args, "__dict__"):
            raise CheckpointError(f"{where} has a {type(args).__name__} instead of arguments")
        self._values = {name: value for name, value in vars(args).items() if value is not None}

    def get(self, name: str, default: Any = None) -> Any:
        return self._values.get(name, default)

    def given(self, names: tuple[str, ...]) -> dict[str, Any]:
        return {name: self._values[name] for name in names if name in self._values}

    def required(self, name: str) -> Any:
        if name not in self._values:
            raise CheckpointError(f"{self.where} has arguments without {name}; a model cannot be built without it")
        return self._values[name]

    def integer(self, name: str, default: int | None = None) -> int:
        """Return a whole number, which Megatron may store as 500000.0; required if there is no default."""
        value = self.required(name) if default is None else self.get(name, default)
        if type(value) not in (int, float) or not abs(value) <= _LARGEST or value != int(value):
            self.refuse(name, f"a whole number, of at most {_LARGEST}")
        return int(value)

    def layers(self) -> int:
        count = self.integer("num_layers")
        if not 0 < count <= MAX_LAYERS:
            self.refuse("num_layers", f"1 to {MAX_LAYERS}")
        return count

    def share(self, name: str) -> float:
        """Return a number from 0 to 1; 0 if it is absent."""
        value = self.get(name, 0.0)
        if type(value) not in (int, float) or not 0 <= value <= 1:
            self.refuse(name, "0 to 1")
        return value

    def require_off(self, names: tuple[str, ...]) -> None:
        for name in names:
            if self.get(name):
                self.refuse(name, "off")

    def refuse(self, name: str, supported: str) -> NoReturn:
        raise CheckpointError(
            f"{self.where} has {name} = {self.get(name)!r}, which is not supported; supported is {supported}"
        )


def _require_supported(known: _Arguments, is_gpt: bool) -> None:
    known.require_off(_MUST_BE_OFF)
    for name, allowed in _ALLOWED.items():
        is_yarn = is_gpt and name == _POSITIONS and known.get(name) == YARN
        if known.get(name, allowed[0]) not in allowed and not is_yarn:
            known.refuse(name, " or ".join(map(str, allowed)))
    if not is_gpt:
        known.require_off(_MUST_BE_OFF_IN_HYBRIDS)
    elif known.get("experimental_attention_variant", _DELTA_NET) != _DELTA_NET:
        known.refuse("experimental_attention_variant", _DELTA_NET)
    elif known.get("experimental_attention_variant") and not known.get("swiglu"):
        known.refuse("experimental_attention_variant", "gated_delta_net with swiglu, whose activation it shares")
    spec = known.get("spec")
    is_texts = isinstance(spec, list | tuple) and all(type(item) is str for item in spec)
    if spec and not (is_texts and len(spec) <= 2 and is_megatrons_spec((spec[0], spec[-1]))):
        known.refuse("spec", f"Megatron's own, in {', '.join(MEGATRONS_MODULES)}")


def _pattern(known: _Arguments, is_gpt: bool) -> tuple[str, str | None]:
    """Return one letter a layer, and the kind of recurrent layers if the pattern determines it."""
    if is_gpt:
        return "".join(map("".join, zip(_gpt_mixers(known), _gpt_mlps(known), strict=True))), None
    pattern = known.get("hybrid_override_pattern") or known.get("hybrid_layer_pattern")
    if pattern is not None:
        if type(pattern) is not str:
            known.refuse("hybrid_override_pattern", "a text of one letter a layer")
        try:
            pattern, recurrent_layer = read_pattern(pattern)
        except ConfigError as error:
            raise CheckpointError(f"{known.where}: {error}") from None
        if known.get("num_layers", len(pattern)) != len(pattern):
            known.refuse("num_layers", f"{len(pattern)}, the length of its pattern {pattern!r}")
        return pattern, recurrent_layer
    ratios = (known.share("hybrid_attention_ratio"), known.share("hybrid_mlp_ratio"))
    return pattern_from_ratios(known.layers(), *ratios), None


def _gpt_mixers(known: _Arguments) -> str:
    """Return M for each layer with a gated delta net, W for each with attention in a window, * for each other one."""
    plain = "*" * known.layers()
    if known.get("experimental_attention_variant") is not None:
        return _by_frequency(known, "linear_attention_freq", 0, partial(windowed_letters, plain)).replace("W", "M")
    if _window(known) is None:
        return plain
    return _by_frequency(known, "window_attn_skip_freq", None, partial(windowed_letters, plain))


def _gpt_mlps(known: _Arguments) -> str:
    """Return E for each layer with experts, - for each with an MLP."""
    if not known.get("num_experts"):
        return "-" * known.layers()
    return _by_frequency(known, "moe_layer_freq", EVERY_LAYER, partial(moe_letters, count=known.layers()))


def _by_frequency(known: _Arguments, name: str, default: int | None, letters: Callable[..., str]) -> str:
    """Return the letters of all layers from an argument: a number of layers, or 0 or 1 for each."""
    freq = known.get(name, default)
    try:
        if not isinstance(freq, int | list | None):
            raise ValueError
        return letters(freq)
    except ValueError:
        known.refuse(name, f"a number of layers, or a list of 0 and 1 for each of {known.layers()} layers")


def _norm_epsilon(known: _Arguments, pattern: str) -> float:
    name = "norm_epsilon" if known.get("norm_epsilon") is not None else "layernorm_epsilon"
    epsilon = known.get(name, _MAMBA_NORM_EPSILON)
    is_mamba = "M" in pattern and known.get("experimental_attention_variant") is None
    if is_mamba and epsilon != _MAMBA_NORM_EPSILON:
        known.refuse(name, f"{_MAMBA_NORM_EPSILON} with Mamba layers, whose gated norm has it in any case")
    return epsilon


def _vocabulary(known: _Arguments, asked: int | None) -> int:
    """Return the ids of the model: all stored rows, or the requested ids if the other rows can be padding."""
    padded = known.integer("padded_vocab_size")
    if asked is None:
        return padded
    step = known.integer("make_vocab_size_divisible_by", 128) * known.integer("tensor_model_parallel_size", 1)
    if not padded - step < asked <= padded:
        raise CheckpointError(
            f"--vocab-size {asked} does not fit {known.where}, whose vocabulary of {padded} is padded to a multiple of "
            f"{step}; give more than {padded - step} and at most {padded}"
        )
    return asked
