"""Fields of a decoded `config.json` of any family: harmless ones, checks by name, and tables.

Every field that a family knows belongs to exactly one category of its table.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from megatron_ext.config import LARGEST_SIZE, MAX_LAYERS, ModelConfig
from megatron_ext.config.source import HfOverrides
from megatron_ext.errors import ConfigError
from megatron_ext.files import read_json

CONFIG_FILE = "config.json"

Values = Mapping[str, object]  # of a `config.json`, or of fields of `ModelConfig`


def read_fields(directory: Path, overrides: HfOverrides | None = None) -> Fields:
    """Read the `config.json` in a directory, with `--hf-overrides`.

    Raises:
        CheckpointError: No `config.json`, or one that is not JSON.
    """
    raw = read_json(directory / CONFIG_FILE)
    return Fields(raw if overrides is None else overrides.over(raw))


def names(text: str) -> frozenset[str]:
    """Return the names of fields in a text separated by white space."""
    return frozenset(text.split())


# Fields that change no logits in any family whose table does not list them: initialization and training, outputs other
# than logits, generation, kernels and their caches, other modalities, names and versions.
WITHOUT_EFFECT = names(
    """
    initializer_range init_method A_initializer_range conv_initializer_range emb_initializer_range
    rescale_prenorm_residual block_mlp_init_scale block_out_init_scale block_use_xavier_init conv_use_xavier_init
    time_step_min time_step_max time_step_floor time_step_rank time_step_scale time_step_init_scheme
    mamba_dt_min mamba_dt_max mamba_dt_init_floor
    linear_a_log_min linear_a_log_max linear_dt_min linear_dt_max linear_dt_init_floor
    attention_dropout hidden_dropout neftune_noise_alpha gradient_checkpointing use_reentrant_checkpointing
    router_aux_loss_coef router_jitter_noise z_loss_coefficient
    return_dict output_attentions output_hidden_states output_router_logits num_logits_to_keep
    calc_logits_for_entire_prompt id2label label2id problem_type finetuning_task task_specific_params
    do_sample temperature top_k top_p typical_p repetition_penalty length_penalty diversity_penalty num_beams
    num_beam_groups num_return_sequences max_new_tokens max_length min_length model_max_length
    use_cache use_mamba_kernels use_mambapy use_falcon_mambapy use_associative_scan use_triton_kernels fused_add_norm
    mamba_ssm_cache_dtype mamba_ssm_dtype moe_shared_expert_overlap torchscript use_bfloat16
    norm_before_gate mlp_expansion_factor max_window_layers initial_context_length pad_vocab_size_multiple
    vision_config audio_config language_model_only
    auto_map dtype torch_dtype transformers_version name_or_path model_name tokenizer_class license internal_version
    unsloth_version unsloth_fixed is_llama_config transformers.js_config
    """
)
_HARMLESS_NAME = re.compile(r"_.*|.*_token_(id|ids|index)")

_FLOATS = ("Infinity", "-Infinity", "NaN")  # in the spelling of transformers 5
_LARGEST_NUMBER = 1e300
REMEDIES = {
    "quantization_config": "; give the folder of the weights that were quantized (on CPUs --cpu-weight-quantization "
    "int8 quantizes them here)",
}
"""Remedies for values that are not supported, by field."""


class Fields(dict[str, object]):
    """Fields of a decoded `config.json`; methods raise a `ConfigError` that names a field with an unsupported value."""

    def refuse(self, name: str, supported: str) -> NoReturn:
        """Raise for the value of a field; `supported` says which ones are."""
        raise ConfigError(f"config.json: {name} = {self.get(name)!r} is not supported; {supported}")

    def required(self, name: str) -> object:
        """Return a required field."""
        if name not in self:
            raise ConfigError(f"config.json: field {name} is missing")
        return self[name]

    def size(self, name: str, default: int | None = None) -> int:
        """Return a positive integer, at most LARGEST_SIZE; the default, if there is one, for null or absent."""
        if default is not None and self.get(name) is None:
            return default
        value = self.required(name)
        if type(value) is not int or value <= 0:
            self.refuse(name, "it must be a positive integer")
        if value > LARGEST_SIZE:
            raise ConfigError(f"config.json: {name} = {value!r} is too large; at most {LARGEST_SIZE} is supported")
        return value

    @property
    def layer_count(self) -> int:
        """Number of decoder layers."""
        count = self.size("num_hidden_layers")
        if count > MAX_LAYERS:
            raise ConfigError(
                f"config.json: num_hidden_layers = {count} is too large; at most {MAX_LAYERS} is supported"
            )
        return count

    def flag(self, name: str, *, default: bool) -> bool:
        """Return a boolean field."""
        value = self.get(name, default)
        if type(value) is not bool:
            self.refuse(name, "it must be true or false")
        return value

    def number(self, name: str, *, default: float | None = None) -> float:
        """Return a number above zero, whole or not; required if there is no default."""
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < _LARGEST_NUMBER:
            self.refuse(name, "it must be a positive number")
        return float(value)

    def check(self, fixed: Mapping[str, tuple[object, ...]]) -> None:
        """Raise unless fields with few supported values have one of them; an absent field has the first."""
        for name, supported in fixed.items():
            value = self.get(name, supported[0])
            comparable = tuple(value) if isinstance(value, list) else value
            is_bool = isinstance(comparable, bool)
            if not any(comparable == option and is_bool == isinstance(option, bool) for option in supported):
                wanted = " or ".join(repr(option) for option in supported)
                self.refuse(name, f"supported is {wanted}{REMEDIES.get(name, '')}")

    def check_divides(self, divisor: str, dividend: str) -> None:
        """Raise unless one size divides another."""
        small, large = self.size(divisor), self.size(dividend)
        if large % small:
            self.refuse(divisor, f"it must divide {dividend} = {large}")

    def letters(self, name: str, letters: Mapping[str, str]) -> str:
        """Return the letters of a list of layer kinds, which is required.

        Args:
            letters: Layer kind -> letter.
        """
        listed = self.required(name)
        supported = f"it must be a list of {', '.join(letters)}"
        if not isinstance(listed, list):
            self.refuse(name, supported)
        for kind in listed:
            if not isinstance(kind, str) or kind not in letters:
                raise ConfigError(
                    f"config.json: {name} has {kind!r}: {name} = {listed!r} is not supported; {supported}"
                )
        return "".join(letters[kind] for kind in listed)

    def layer_letters(self, name: str, letters: Mapping[str, str]) -> str:
        """Return the letters of a list with the kind of each layer; see `letters`."""
        found = self.letters(name, letters)
        check_count(self.layer_count, found, name)
        return found

    def layer_numbers(self, name: str) -> frozenset[int]:
        """Return the layer numbers in a list; empty if it is null or absent."""
        listed, count = self.get(name), self.layer_count
        if listed is None:
            return frozenset()
        if not isinstance(listed, list) or any(type(index) is not int or not 0 <= index < count for index in listed):
            self.refuse(name, f"it must be a list of layers, 0 to {count - 1}")
        return frozenset(listed)

    def unknown(self, known: Container[str]) -> list[str]:
        """Return the names of fields that are neither known nor harmless, and not empty, null, false or zero."""
        return sorted(
            name
            for name, value in self.items()
            if value and name not in known and name not in WITHOUT_EFFECT and not _HARMLESS_NAME.fullmatch(name)
        )


Letters = Callable[[Fields], str]  # one letter for each layer of theirs


def check_count(count: object, letters: str, source: str) -> None:
    """Raise unless `num_hidden_layers` equals the number of letters from the field `source`."""
    if count != len(letters):
        raise ConfigError(f"config.json: num_hidden_layers {count!r} contradicts the {len(letters)} layers of {source}")


def with_present_names(raw: Values, other_names: Mapping[str, str]) -> Fields:
    """Return fields under their present names, with special floats decoded; a field given twice must be equal."""
    fields = Fields()
    for given_name, encoded in raw.items():
        name, value = other_names.get(given_name, given_name), _decoded(encoded)
        if name in fields and fields[name] != value:
            raise ConfigError(f"config.json: {given_name} {value!r} contradicts {name} {fields[name]!r}")
        fields[name] = value
    return fields


def _decoded(value: object) -> object:
    """Decode infinity: {"__float__": "Infinity"} of transformers 5, or a number such as 1e308 of strict JSON."""
    if isinstance(value, dict) and set(value) == {"__float__"}:
        name = value["__float__"]
        if name not in _FLOATS:
            raise ConfigError(f"config.json: __float__ {name!r} is unknown; one of {', '.join(_FLOATS)}")
        return float(name)
    if isinstance(value, list):
        return [_decoded(item) for item in value]
    if isinstance(value, float) and value > _LARGEST_NUMBER:
        return math.inf
    return value


# Sizes of decoders with attention, and with MLPs, too: field of config.json -> field of `ModelConfig`.
ATTENTION_SIZES: Mapping[str, str] = {
    "hidden_size": "hidden_size",
    "max_position_embeddings": "max_position_embeddings",
    "num_attention_heads": "num_attention_heads",
    "vocab_size": "vocab_size",
}
# In the order in which a configuration is written.
DECODER_SIZES: Mapping[str, str] = dict(sorted({**ATTENTION_SIZES, "intermediate_size": "ffn_hidden_size"}.items()))
SILU = ("silu", "swish")

# Fields of every family.
_READ = names("architectures model_type num_hidden_layers tie_word_embeddings")
FIXED_IN_ALL: Mapping[str, tuple[object, ...]] = {
    "quantization_config": (None,),
    "quantization": (None,),
    "is_encoder_decoder": (False,),
}


@dataclass(frozen=True)
class FieldTable:
    """Fields of one family; the fields that all families share are added.

    Attributes:
        sizes: Positive integers -> their names in `ModelConfig`.
        numbers: Positive numbers -> their names in `ModelConfig` and their defaults.
        fixed: Fields with the supported values; an absent field has the first.
        read: Names of fields that the family's functions translate.
        other_names: Older or newer names -> names in this table.
        defaults: transformers' defaults of absent fields.
        is_tied: Default of tied embedding and output matrices.
    """

    sizes: Mapping[str, str] = field(default_factory=dict)
    numbers: Mapping[str, tuple[str, float]] = field(default_factory=dict)
    fixed: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    read: frozenset[str] = frozenset()
    other_names: Mapping[str, str] = field(default_factory=dict)
    defaults: Values = field(default_factory=dict)
    is_tied: bool = False

    def __or__(self, other: FieldTable) -> FieldTable:
        """Return the fields of both tables; entries of the other one win."""
        return FieldTable(**{name: value | getattr(other, name) for name, value in vars(self).items()})

    @property
    def known(self) -> frozenset[str]:
        """Names of the fields that decide the logits."""
        return frozenset((*self.sizes, *self.numbers, *self.fixed, *FIXED_IN_ALL)) | self.read | _READ

    def checked(self, raw: Values) -> Fields:
        """Check a decoded `config.json` and return it under the names of this table, with defaults.

        Raises:
            ConfigError: A field is given twice and differently, or has a value that is not supported.
        """
        given = with_present_names(raw, self.other_names)
        given.check({**self.fixed, **FIXED_IN_ALL})
        return Fields({**self.defaults, **given})

    def translated(self, fields: Fields) -> dict[str, object]:
        """Translate sizes, numbers and tied embeddings to fields of `ModelConfig`.

        Raises:
            ConfigError: A field is missing, or is not a positive number.
        """
        is_tied = fields.flag("tie_word_embeddings", default=self.is_tied)
        return {
            **{ours: fields.size(theirs) for theirs, ours in self.sizes.items()},
            **{ours: fields.number(theirs, default=default) for theirs, (ours, default) in self.numbers.items()},
            "untie_embeddings_and_output_weights": not is_tied,
        }

    def described(self, config: ModelConfig) -> dict[str, object]:
        """Return sizes, numbers and tied embeddings of a model, under the names of this table."""
        values = config.resolved()
        return {
            **{theirs: values[ours] for theirs, ours in self.sizes.items()},
            **{theirs: values[ours] for theirs, (ours, _) in self.numbers.items()},
            "tie_word_embeddings": not config.untie_embeddings_and_output_weights,
        }
