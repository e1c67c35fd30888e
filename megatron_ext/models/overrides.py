"""Overrides of a checkpoint's configuration by flags: precedence and contradictions."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from functools import partial
from pathlib import Path

from megatron_ext.config import RECURRENT_KINDS, BatchingConfig, ModelConfig, SourceConfig
from megatron_ext.config.annotations import FieldValues
from megatron_ext.config.differences import as_flag, differences, logit_differences
from megatron_ext.config.layers import (
    GPT,
    YARN,
    gpt_layers,
    is_gpt_pattern,
    moe_letters,
    parse_layer_freq,
    windowed_letters,
)
from megatron_ext.config.options import flag_of, options_of
from megatron_ext.errors import ConfigError
from megatron_ext.models.megatron.training_args import TrainingFacts
from megatron_ext.parallel.world import is_first_rank

logger = logging.getLogger(__name__)

_COUNT, _POSITIONS, _KIND = "num_layers", "max_position_embeddings", "position_embedding_type"
_FACTOR, _YARN_FACTOR, _WINDOW = "rotary_scaling_factor", "yarn_rotary_scaling_factor", "attention_window"
# Fields of `ModelConfig` that determine how stored weights are split. Equal shapes do not make them equal: four heads
# of 64 and eight of 32 have the same matrices.
_LAYOUT = (
    *("hybrid_override_pattern", "hidden_size", "ffn_hidden_size", "num_experts", "num_attention_heads"),
    *("num_query_groups", "kv_channels", "attention_output_gate", "recurrent_layer"),
    *(name for kind in RECURRENT_KINDS.values() for name in kind.layout),
    *("vocab_size", "mtp_num_layers", "mtp_hybrid_override_pattern"),
)
_OURS = ("spec", "vocab_size")  # flags that are not in Megatron's checkpoint arguments


def fitting_overrides(
    source: SourceConfig, saved: ModelConfig, overrides: FieldValues, directory: Path, trained: TrainingFacts | None
) -> FieldValues:
    """Return the overrides that change a checkpoint's configuration; flags without a field are only checked.

    With `--use-checkpoint-args` differing overrides are dropped, and logged; without it they are errors if they change
    a logit. `--override-checkpoint-args` allows the flags that it names in either case.

    Args:
        source: Settings that are not fields of the model.
        overrides: Fields set by flags.
        directory: The checkpoint's, for messages.

    Raises:
        ConfigError: A field that changes a logit, a number of layers, a kind of model or rows of the embedding that
            differ from the checkpoint's.
    """
    _check_provider(source, saved, directory, trained)
    _check_rows(source, saved, directory, trained)
    _check_layer_freqs(source, saved, directory)
    wanted = _without_unused_yarn(saved, {name: value for name, value in overrides.items() if name != _COUNT})
    others, typed = _count_that_differs(saved, overrides), dict(source.typed)
    named = set(source.override_checkpoint_args)
    allowed = {
        name
        for name, value in wanted.items()
        if _names(name, typed.get(name)) & named and not _is_stored(saved, name, value)
    }
    if not source.use_checkpoint_args:
        if others:
            raise ConfigError(
                f"--num-layers {overrides[_COUNT]} contradicts {directory}, which has {_counts(saved)}; leave it "
                "out or load another checkpoint"
            )
        others = {name: there for name, there in logit_differences(saved, wanted).items() if name not in allowed}
        if others:
            raise ConfigError(_contradiction(source, saved, directory, {name: wanted[name] for name in others}, others))
        return wanted
    others |= differences(saved, {name: value for name, value in wanted.items() if name not in _OURS})
    if wanted.get(_POSITIONS, saved.max_position_embeddings) != saved.max_position_embeddings:
        others[_POSITIONS] = saved.max_position_embeddings
    others = {name: there for name, there in others.items() if name not in allowed}
    if others and is_first_rank():
        flags = ", ".join(_as_typed(source, saved, overrides, others))
        logger.warning("--use-checkpoint-args: %s decides over %s", directory, flags)
    return {name: value for name, value in wanted.items() if name not in others}


def require_layout(saved: ModelConfig, config: ModelConfig, directory: Path) -> None:
    """Require that a configuration splits stored weights as the checkpoint's own does."""
    asked, stored = config.resolved(), saved.resolved()
    for name in _LAYOUT:
        if asked[name] != stored[name]:
            flag = options_of(ModelConfig)[name].name(name)
            raise ConfigError(
                f"{flag} {asked[name]} contradicts {directory}, whose weights are for {stored[name]}; "
                "leave it out or load another checkpoint"
            )


def _is_stored(saved: ModelConfig, field: str, value: object) -> bool:
    """Return whether the stored weights themselves decide a field, so that no override can be allowed."""
    return field in _LAYOUT or (field == _WINDOW and None in (saved.attention_window, value))


def _names(field: str, typed: str | None) -> set[str]:
    """Return the names by which `--override-checkpoint-args` may mean a field: its own, and the typed flags'."""
    flags = [word for word in (typed or "").split() if word.startswith("--")]
    return {flag.removeprefix("--") for flag in (flag_of(field), *flags)}


def _without_unused_yarn(saved: ModelConfig, wanted: FieldValues) -> FieldValues:
    """Drop settings of YaRN without its type of positions, in flags or checkpoint; Megatron ignores them, too."""
    if _KIND in wanted or saved.yarn_rotary_scaling_factor is not None:
        return wanted
    unused = [name for name in wanted if name.startswith("yarn_")]
    if unused and is_first_rank():
        flags = ", ".join(map(flag_of, unused))
        logger.warning("%s: without effect, since the checkpoint's positions are not of type %s", flags, YARN)
    return {name: value for name, value in wanted.items() if name not in unused}


def _as_typed(source: SourceConfig, saved: ModelConfig, given: FieldValues, stored: FieldValues) -> list[str]:
    """Format differences as the flags that were typed, each with the checkpoint's value."""
    typed, found = dict(source.typed), []
    for name, there in stored.items():
        words = typed.get(name)
        if words is None:
            found.append(as_flag(name, given[name], there))
            continue
        if name in (_KIND, _YARN_FACTOR) and (there is None or flag_of(_FACTOR) not in words):
            there = saved.position_embedding_type if saved.yarn_rotary_scaling_factor is None else YARN
        if name == _WINDOW and words.startswith("--window-size"):
            there = "-1,-1" if saved.attention_window is None else f"{saved.attention_window - 1},0"
        found.append(f"{words} (not {there})")
    return list(dict.fromkeys(found))


def _contradiction(
    source: SourceConfig, saved: ModelConfig, directory: Path, given: FieldValues, stored: FieldValues
) -> str:
    flags = _as_typed(source, saved, given, stored)
    contradicts, them = ("contradicts", "it") if len(flags) == 1 else ("contradict", "them")
    words = dict(source.typed)
    names = dict.fromkeys(words.get(name, flag_of(name)).split()[0].removeprefix("--") for name in given)
    if source.load_hf:
        remedy = "or change its config.json with --hf-overrides"
    elif any(_is_stored(saved, name, value) for name, value in given.items()):
        remedy = "or load another checkpoint; with --use-checkpoint-args the checkpoint's values are taken"
    else:
        remedy = f"or allow the difference with --override-checkpoint-args {' '.join(names)}"
    return f"{', '.join(flags)} {contradicts} {directory}; leave {them} out, {remedy}"


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


def _check_layer_freqs(source: SourceConfig, saved: ModelConfig, directory: Path) -> None:
    """Compare the layers of a GPT that have experts or windows; a flag has no effect on a model without them."""
    pattern = saved.hybrid_override_pattern
    mixers, mlps, is_gpt = pattern[::2], pattern[1::2], gpt_layers(pattern) is not None
    experts, windows = source.moe_layer_freq, source.window_attn_skip_freq
    with_windows = partial(windowed_letters, mixers.replace("W", "*"))
    for flag, text, kind, stored, letters in (
        ("--moe-layer-freq", experts, "experts", mlps if saved.is_moe else "", partial(moe_letters, count=len(mlps))),
        ("--window-attn-skip-freq", windows, "windows", mixers if saved.attention_window else "", with_windows),
    ):
        if text is None:
            continue
        if is_gpt and stored:
            with contextlib.suppress(ValueError):
                if letters(parse_layer_freq(text, flag)) == stored:
                    continue
            if not source.use_checkpoint_args:
                raise ConfigError(
                    f"{flag} {text} contradicts {directory}, whose layers are {pattern}; leave it out or load another "
                    "checkpoint"
                )
            if is_first_rank():
                logger.warning("--use-checkpoint-args: %s decides over %s %s", directory, flag, text)
        elif is_first_rank():
            logger.warning("%s %s has no effect: %s is not a GPT with %s", flag, text, directory, kind)


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
