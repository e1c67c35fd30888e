"""Overrides of a checkpoint's configuration by flags: precedence and contradictions."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

from megatron_ext.config import BatchingConfig, ModelConfig, SourceConfig
from megatron_ext.config.annotations import FieldValues
from megatron_ext.config.embedded import as_flag, differences
from megatron_ext.config.layers.layer_freq import moe_letters, parse_layer_freq
from megatron_ext.config.layers.pattern import GPT, gpt_layers, is_gpt_pattern
from megatron_ext.errors import ConfigError
from megatron_ext.models.megatron.facts import TrainingFacts
from megatron_ext.parallel.world import is_first_rank

logger = logging.getLogger(__name__)

_COUNT, _POSITIONS = "num_layers", "max_position_embeddings"
_OURS = ("spec", "vocab_size")  # flags that are not in Megatron's checkpoint arguments


def fitting_overrides(
    source: SourceConfig, saved: ModelConfig, overrides: FieldValues, directory: Path, trained: TrainingFacts | None
) -> FieldValues:
    """Return the overrides that change a checkpoint's configuration; flags without a field are only checked.

    With `--use-checkpoint-args` differing overrides are dropped, and logged.

    Args:
        source: Settings that are not fields of the model.
        saved: The checkpoint's configuration.
        overrides: Fields set by flags.
        directory: The checkpoint's, for messages.
        trained: Training facts of a checkpoint of Megatron-LM.

    Raises:
        ConfigError: A number of layers, a kind of model or rows of the embedding that differ from the checkpoint's.
    """
    _check_provider(source, saved, directory, trained)
    _check_rows(source, saved, directory, trained)
    _check_moe_layers(source, saved, directory)
    wanted = {name: value for name, value in overrides.items() if name != _COUNT}
    others = _count_that_differs(saved, overrides)
    if not source.use_checkpoint_args:
        if others:
            raise ConfigError(
                f"--num-layers {overrides[_COUNT]} contradicts {directory}, which has {_counts(saved)}; leave it "
                "out or load another checkpoint"
            )
        return wanted
    others |= differences(saved, {name: value for name, value in wanted.items() if name not in _OURS})
    if wanted.get(_POSITIONS, saved.max_position_embeddings) != saved.max_position_embeddings:
        others[_POSITIONS] = saved.max_position_embeddings
    if others and is_first_rank():
        flags = ", ".join(as_flag(name, overrides[name], there) for name, there in others.items())
        logger.warning("--use-checkpoint-args: %s decides over %s", directory, flags)
    return {name: value for name, value in wanted.items() if name not in others}


def within_positions(batching: BatchingConfig, source: SourceConfig, model: ModelConfig) -> BatchingConfig:
    """Return the batching with a maximum length that the model's positions cover, if the checkpoint decides.

    Megatron's recipes give one length for all models. Without `--use-checkpoint-args` a longer one is an error.
    """
    asked, positions = batching.max_sequence_length, model.positions
    if not source.use_checkpoint_args or batching.allow_long_max_model_len:
        return batching
    if asked is None or positions is None or asked <= positions:
        return batching
    if is_first_rank():
        logger.warning(
            "--use-checkpoint-args: the model's %d positions decide over --inference-max-seq-length %d",
            positions,
            asked,
        )
    return dataclasses.replace(batching, max_sequence_length=positions)


def _count_that_differs(saved: ModelConfig, overrides: FieldValues) -> dict[str, object]:
    """Return the number of layers if it differs from the checkpoint's in both ways of counting."""
    pattern = saved.hybrid_override_pattern
    if overrides.get(_COUNT) in (None, len(pattern), gpt_layers(pattern)):
        return {}
    return {_COUNT: gpt_layers(pattern) or len(pattern)}


def _counts(saved: ModelConfig) -> str:
    pattern = saved.hybrid_override_pattern
    pairs = gpt_layers(pattern)
    return f"{len(pattern)} layers" + (f", or {pairs} layers of a GPT" if pairs else "")


def _check_moe_layers(source: SourceConfig, saved: ModelConfig, directory: Path) -> None:
    """Compare --moe-layer-freq with the layers of a GPT that have experts; other models have none to compare."""
    pattern, text = saved.hybrid_override_pattern, source.moe_layer_freq
    count = gpt_layers(pattern)
    if text is None or count is None or not saved.is_moe:
        return
    stored = pattern[1::2]
    try:
        asked = moe_letters(parse_layer_freq(text), count)
    except ValueError:
        asked = ""
    if asked == stored:
        return
    if not source.use_checkpoint_args:
        raise ConfigError(
            f"--moe-layer-freq {text} contradicts {directory}, whose layers are {pattern}; leave it out or load "
            "another checkpoint"
        )
    if is_first_rank():
        logger.warning("--use-checkpoint-args: %s decides over --moe-layer-freq %s", directory, text)


def _check_provider(source: SourceConfig, saved: ModelConfig, directory: Path, trained: TrainingFacts | None) -> None:
    asked = source.model_provider
    if asked == GPT and not is_gpt_pattern(saved.hybrid_override_pattern):
        raise ConfigError(
            f"--model-provider {asked} contradicts {directory}, whose layers are {saved.hybrid_override_pattern}; give "
            "hybrid, or leave it out"
        )
    if asked not in (None, GPT) and trained is not None and trained.is_gpt:
        raise ConfigError(
            f"--model-provider {asked} contradicts {directory}, which is a GPT's; give {GPT}, or leave it out"
        )


def _check_rows(source: SourceConfig, saved: ModelConfig, directory: Path, trained: TrainingFacts | None) -> None:
    rows = trained.vocabulary_rows if trained is not None else saved.vocab_size
    if source.padded_vocab_size not in (None, rows):
        raise ConfigError(
            f"--padded-vocab-size {source.padded_vocab_size} contradicts {directory}, whose embedding has {rows} rows; "
            "leave it out or load another checkpoint"
        )
