"""Definition of a Hugging Face family; translation and loading are shared by all families."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_ext.config import ModelConfig
from megatron_ext.errors import ConfigError
from megatron_ext.models.huggingface.fields import FIXED_IN_ALL, Fields, FieldTable, Letters, Values, names
from megatron_ext.models.huggingface.tensors import TensorTable

PREDICTION_COUNTS = ("mtp_num_hidden_layers", "num_nextn_predict_layers")  # layers of multi-token prediction

# Fields that most families have in common; a family's constants win.
_USUAL = {"normalization": "RMSNorm", "disable_bias_linear": True, "position_embedding_type": "none"}
_ABOVE_TEXT = names("architectures model_type text_config") | FIXED_IN_ALL.keys()  # of a file of several models


@dataclass(frozen=True)
class Family:
    """Family of models: fields of its configuration and tensors of its checkpoints, in megatron-core's terms.

    Attributes:
        model_type: Value in `config.json` that identifies the family of a checkpoint.
        architecture: transformers' class of the model that generates text.
        fields: Table of the fields in `config.json`.
        pattern: Returns the letters of the layers, from checked fields; W has a window of `sliding_window` tokens.
        tensors: Table of the source of each tensor of the model.
        constants: Fields of `ModelConfig` that are the same for every model of the family.
        derived: Functions that compute fields of `ModelConfig` from checked fields; later ones win over earlier ones,
            and all of them over the others.
        experts: Like one of `derived`, for models with MoE layers; optional.
        text: Extracts the fields of the text model from a file that also describes other models.
        prediction: Returns the letters of the layer of multi-token prediction, from checked fields; None for families
            without.
        described: Returns fields of `config.json` from a `ModelConfig`, right or wrong; None for families whose models
            are written with an example only.
    """

    model_type: str
    architecture: str
    fields: FieldTable
    pattern: Letters
    tensors: TensorTable
    constants: Mapping[str, object] = field(default_factory=dict)
    derived: tuple[Callable[[Fields], Values], ...] = ()
    experts: Callable[[Fields], Values] = lambda fields: {}
    text: Callable[[Values], Values] = lambda raw: raw
    prediction: Letters | None = None
    described: Callable[[ModelConfig], Values] | None = None

    def translate(self, raw: Values) -> ModelConfig:
        """Translate a decoded `config.json` of this family to a `ModelConfig`.

        Raises:
            ConfigError: A field is missing, or has a value that is not supported; the message names it.
        """
        if raw.get("architectures") not in (None, [self.architecture]):
            raise ConfigError(
                f"config.json: architectures {raw['architectures']!r} is not supported; supported is "
                f"{self.architecture!r} of model_type {raw.get('model_type')!r}"
            )
        Fields(raw).check(FIXED_IN_ALL)
        fields = self.fields.checked(self.text(raw))
        pattern = self.pattern(fields)
        values: dict[str, Any] = {
            **_USUAL,
            **self.constants,
            **self.fields.translated(fields),
            **{name: value for derive in self.derived for name, value in derive(fields).items()},
            **({"attention_window": fields.size("sliding_window")} if "W" in pattern else {}),
            **(self.experts(fields) if "E" in pattern else {}),
        }
        return ModelConfig(hybrid_override_pattern=pattern, **values)

    def unknown_fields(self, raw: Values) -> list[str]:
        """Return the names of the fields that this family neither reads nor knows as harmless."""
        text = self.text(raw)
        above = Fields({name: value for name, value in raw.items() if text.get(name) != value})
        inside = Fields(text).unknown(self.fields.known | set(self.fields.other_names))
        return sorted({*inside, *above.unknown(_ABOVE_TEXT)})

    def with_prediction(self, config: ModelConfig, raw: Values) -> ModelConfig:
        """Return the configuration with the layer of multi-token prediction of a checkpoint that has its tensors.

        One layer serves all depths.

        Raises:
            ConfigError: The file describes several layers, or one that is not supported.
        """
        assert self.prediction is not None, "the caller has looked"
        fields = self.fields.checked(self.text(raw))
        fields.check(dict.fromkeys(PREDICTION_COUNTS, (1,)) | {"mtp_use_dedicated_embeddings": (False,)})
        pattern = self.prediction(fields)
        return replace(config, mtp_num_layers=1, mtp_use_repeated_layer=True, mtp_hybrid_override_pattern=pattern)

    def describe(self, config: ModelConfig) -> Values:
        """Return a `config.json` that is translated to an equal model.

        Raises:
            ConfigError: The family has no such model; the message names the first field that would be another.
        """
        assert self.described is not None, "the caller has looked"
        raw = {"architectures": [self.architecture], "model_type": self.model_type, **self.described(config)}
        translated = self.translate(raw)
        if config.mtp_num_layers:
            translated = self.with_prediction(translated, raw)
        ours, theirs = config.resolved(), translated.resolved()
        for name in ours:
            if name != "spec" and ours[name] != theirs[name]:
                raise ConfigError(f"{name} is {ours[name]!r}, and a {self.model_type} would have {theirs[name]!r}")
        return raw
