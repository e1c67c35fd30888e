"""What is to be said of a Hugging Face family; how it is read and loaded is shared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_ext.config import ModelConfig
from megatron_ext.models.huggingface.field_table import FieldTable
from megatron_ext.models.huggingface.fields import Fields, check_architecture
from megatron_ext.models.huggingface.tensors import TensorTable

# What most families have in common; a family's constants win.
_USUAL = {"normalization": "RMSNorm", "disable_bias_linear": True, "position_embedding_type": "none"}


def _nothing(_: Fields) -> Fields:
    return {}


def _all(raw: Fields) -> Fields:
    return raw


@dataclass(frozen=True)
class Family:
    """A family of models: fields of its configuration and tensors of its checkpoints, in megatron-core's terms.

    Attributes:
        model_type: In `config.json`; what a checkpoint is known by.
        architecture: transformers' class of the model that generates text.
        fields: What `config.json` may say.
        pattern: Letters of the layers, from checked fields.
        tensors: What each tensor of the model comes from.
        constants: Fields of `ModelConfig` that are the same for every model of the family.
        derived: Fields of `ModelConfig` that have to be computed, from checked fields; they win over all others.
        experts: The same, of models with MoE layers; a family without leaves it out.
        text: The fields of the model that generates text, out of a file that has those of others too.
    """

    model_type: str
    architecture: str
    fields: FieldTable
    pattern: Callable[[Fields], str]
    tensors: TensorTable
    constants: Mapping[str, object] = field(default_factory=dict)
    derived: Callable[[Fields], Fields] = _nothing
    experts: Callable[[Fields], Fields] = _nothing
    text: Callable[[Fields], Fields] = _all

    def translate(self, raw: Fields) -> ModelConfig:
        """A decoded `config.json` of this family as a `ModelConfig`.

        Raises:
            ConfigError: A field is missing, unknown, or has a value that is not supported; the message names it.
        """
        check_architecture(raw, self.architecture)
        fields = self.fields.checked(self.text(raw))
        pattern = self.pattern(fields)
        told: dict[str, Any] = {
            **_USUAL,
            **self.constants,
            **self.fields.translated(fields),
            **self.derived(fields),
            **(self.experts(fields) if "E" in pattern else {}),
        }
        return ModelConfig(hybrid_override_pattern=pattern, **told)
