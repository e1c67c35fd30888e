"""Field table of a family's `config.json`: every known field belongs to exactly one category."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from megatron_ext.config import ModelConfig
from megatron_ext.models.huggingface.fields import (
    Fields,
    check_fixed,
    flag,
    names,
    positive_number,
    size,
    with_present_names,
)

# Sizes of decoders with attention and MLPs: field of config.json -> field of `ModelConfig`.
DECODER_SIZES: Mapping[str, str] = {
    "hidden_size": "hidden_size",
    "intermediate_size": "ffn_hidden_size",
    "max_position_embeddings": "max_position_embeddings",
    "num_attention_heads": "num_attention_heads",
    "vocab_size": "vocab_size",
}
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

    sizes: Mapping[str, str]
    numbers: Mapping[str, tuple[str, float]]
    fixed: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    read: frozenset[str] = frozenset()
    other_names: Mapping[str, str] = field(default_factory=dict)
    defaults: Fields = field(default_factory=dict)
    is_tied: bool = False

    @property
    def known(self) -> frozenset[str]:
        """Names of the fields that decide the logits."""
        return frozenset((*self.sizes, *self.numbers, *self.fixed, *FIXED_IN_ALL)) | self.read | _READ

    def checked(self, raw: Fields) -> Fields:
        """Check a decoded `config.json` and return it under the names of this table, with defaults.

        Raises:
            ConfigError: A field is given twice and differently, or has a value that is not supported.
        """
        fields = with_present_names(raw, self.other_names)
        check_fixed(fields, {**self.fixed, **FIXED_IN_ALL})
        return {**self.defaults, **fields}

    def translated(self, fields: Fields) -> dict[str, object]:
        """Translate sizes, numbers and tied embeddings to fields of `ModelConfig`.

        Raises:
            ConfigError: A field is missing, or is not a positive number.
        """
        is_tied = flag(fields, "tie_word_embeddings", default=self.is_tied)
        return {
            **{ours: size(fields, theirs) for theirs, ours in self.sizes.items()},
            **{
                ours: positive_number(fields, theirs, default=default)
                for theirs, (ours, default) in self.numbers.items()
            },
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
