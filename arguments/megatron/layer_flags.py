"""Layers from Megatron-LM's flags: a pattern, a count of GPT layers or ratios of kinds; windows, and yarn."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from arguments.parsed_flags import ParsedFlags
from megatron_ext.config import MAX_LAYERS
from megatron_ext.config.layers import (
    EVERY_LAYER,
    GPT,
    YARN,
    gpt_pattern,
    is_gpt_pattern,
    moe_letters,
    parse_layer_freq,
    pattern_from_ratios,
    read_pattern,
    windowed_letters,
)
from megatron_ext.errors import ConfigError

_PATTERN, _COUNT, _PROVIDER, _FREQ = "hybrid-override-pattern", "num-layers", "model-provider", "moe-layer-freq"
CHECKPOINTS = {"load", "load-hf"}
_RATIOS = ("hybrid-attention-ratio", "hybrid-mlp-ratio")

_POSITIONS, _FACTOR = "position-embedding-type", "rotary-scaling-factor"
_YARN_KEYS = (
    _FACTOR,
    "yarn-original-max-position-embeddings",
    "yarn-beta-fast",
    "yarn-beta-slow",
    "mscale",
    "mscale-all-dim",
    "yarn-correction-range-round-to-int",
)
_SIZE, _SKIP_FREQ, _WINDOW = "window-size", "window-attn-skip-freq", "attention-window"
_BEFORE_AND_AFTER = re.compile(r"\(?\s*(-1|\d{1,9})\s*,\s*(-1|\d{1,9})\s*\)?")


def describe_layers(given: ParsedFlags) -> None:
    """Replace the given flags by a layer pattern, in place; they come from both the command line and the file.

    A pattern overrides a count and ratios of kinds, as in Megatron. The reader of a checkpoint compares its number of
    layers.

    Raises:
        ConfigError: The flags give no pattern.
    """
    values: dict[str, Any] = given.values
    ratios = [values.pop(name, 0.0) for name in _RATIOS]
    if _PATTERN in values:
        typed = given.typed.setdefault(_PATTERN, f"--{_PATTERN}") + f" {values[_PATTERN]}"
        pattern, recurrent_layer = read_pattern(values[_PATTERN])
        values[_PATTERN], given.typed[_PATTERN] = pattern, typed
        if recurrent_layer is not None:
            _set_recurrent_layer(values, recurrent_layer)
            given.typed["recurrent-layer"] = typed
        if values.get(_COUNT, len(pattern)) != len(pattern):
            given.without_effect.note(f"--{_COUNT}")
            del values[_COUNT]
        for name, ratio in zip(_RATIOS, ratios, strict=True):
            if ratio:
                given.without_effect.note(f"--{name}")
    elif any(ratios):
        values[_PATTERN] = _allocated(values.get(_COUNT), *ratios)
        given.typed[_PATTERN] = " ".join(f"--{name} {ratio}" for name, ratio in zip(_RATIOS, ratios, strict=True))
    is_gpt = values.get(_PROVIDER) == GPT or _is_new_gpt(values)
    makes_pattern = is_gpt and "num-experts" in values and _PATTERN not in values
    if _FREQ in values and not makes_pattern and not CHECKPOINTS & values.keys():  # which compare it
        given.without_effect.note(f"--{_FREQ}")
    if is_gpt:
        _describe_gpt(values)


def _is_new_gpt(values: Mapping[str, Any]) -> bool:
    """Return whether flags without a checkpoint count layers but give no pattern: a GPT, as in Megatron.

    Raises:
        ConfigError: Another kind of model is requested, and that needs a pattern.
    """
    if _COUNT not in values or _PATTERN in values or CHECKPOINTS & values.keys():
        return False
    provider = values.get(_PROVIDER)
    if provider is not None:
        raise ConfigError(
            f"--{_PROVIDER} {provider} with --{_COUNT} {values[_COUNT]} needs the kinds of its layers; give "
            "--hybrid-layer-pattern, or a checkpoint (--load, --load-hf)"
        )
    return True


def _set_recurrent_layer(values: dict[str, Any], kind: str) -> None:
    if values.setdefault("recurrent-layer", kind) != kind:
        raise ConfigError(
            f"--recurrent-layer {values['recurrent-layer']} contradicts the pattern, in which G stands for {kind}; "
            "leave it out"
        )


def _describe_gpt(values: dict[str, Any]) -> None:
    if _PATTERN in values:
        if not is_gpt_pattern(values[_PATTERN]):
            raise ConfigError(
                f"--model-provider {GPT} and --{_PATTERN} {values[_PATTERN]!r} contradict each other: each layer of a "
                "GPT is an attention and an MLP or experts; give --model-provider hybrid"
            )
    elif not CHECKPOINTS & values.keys():
        if _COUNT not in values:
            raise ConfigError(f"--model-provider {GPT} needs --{_COUNT}, or a checkpoint (--load, --load-hf)")
        values[_PATTERN] = gpt_pattern(_mlps(values, _checked_count(values.pop(_COUNT))))


def _mlps(values: dict[str, Any], count: int) -> str:
    """Return - or E for each of the layers of a GPT."""
    if "num-experts" not in values:
        return "-" * count
    text = values.get(_FREQ, str(EVERY_LAYER))
    freq = parse_layer_freq(text)
    try:
        return moe_letters(freq, count)
    except ValueError:
        raise ConfigError(
            f"--{_FREQ} {text} does not fit --{_COUNT} {count}; give a number of layers, or 0 or 1 for each of them"
        ) from None


def _allocated(count: int | None, attention: float, mlp: float) -> str:
    if count is None:
        raise ConfigError(
            f"--{_RATIOS[0]} {attention} and --{_RATIOS[1]} {mlp} are fractions of --{_COUNT}; give that flag too"
        )
    if min(attention, mlp) < 0 or not attention + mlp <= 1:
        raise ConfigError(
            f"--{_RATIOS[0]} {attention} and --{_RATIOS[1]} {mlp} must be fractions from 0 to 1 with a sum of at most 1"
        )
    return pattern_from_ratios(_checked_count(count), attention, mlp)


def _checked_count(count: int) -> int:
    if not 0 < count <= MAX_LAYERS:
        raise ConfigError(f"--{_COUNT} {count} must be from 1 to {MAX_LAYERS}")
    return count


def describe_attention(given: ParsedFlags) -> None:
    """Replace Megatron's flags of windows and yarn by flags of a pattern and rope, in place.

    The flags come from both the command line and the file; the pattern is known.

    Raises:
        ConfigError: A window that is no window into the past, or that the layers cannot have.
    """
    _describe_yarn(given)
    _describe_window(given)


def _describe_yarn(given: ParsedFlags) -> None:
    values, positions = given.values, given.values.get(_POSITIONS)
    has_checkpoint = bool(CHECKPOINTS & values.keys())
    if positions == YARN:
        given.typed[_POSITIONS] = f"--{_POSITIONS} {YARN}"
        values[_POSITIONS] = "rope"
        factor = f" --{_FACTOR} {values[_FACTOR]}" if _FACTOR in values else ""
        given.typed[_FACTOR] = given.typed[_POSITIONS] + factor
        values.setdefault(_FACTOR, 1.0)
        return
    if positions is None and has_checkpoint:
        return  # they are compared with the checkpoint's, if it has yarn
    for key in _YARN_KEYS:  # as in Megatron
        if key in values:
            given.without_effect.note(f"--{key}")
            del values[key]
    if has_checkpoint:  # which may have yarn
        values[_FACTOR] = None
        given.typed[_FACTOR] = given.typed.get(_POSITIONS, f"--{_POSITIONS} {positions}")


def _describe_window(given: ParsedFlags) -> None:
    values = given.values
    size, freq, pattern = values.pop(_SIZE, None), values.get(_SKIP_FREQ), values.get(_PATTERN)
    window = None if size is None else _window(str(size))
    has_checkpoint = bool(CHECKPOINTS & values.keys())  # whose window and layers are compared
    if size is not None and (window is not None or has_checkpoint):
        if values.setdefault(_WINDOW, window) != window:
            raise ConfigError(
                f"--{_SIZE} {size} and --{_WINDOW} {values[_WINDOW]} contradict each other; give one of them"
            )
        given.typed[_WINDOW] = f"--{_SIZE} {size}"
    elif size is not None:
        given.without_effect.note(f"--{_SIZE}")
    if window is None or pattern is None:
        if freq is not None and not has_checkpoint:
            given.without_effect.note(f"--{_SKIP_FREQ}")
        return
    assert isinstance(pattern, str), "a pattern has been read"
    if not is_gpt_pattern(pattern):
        raise ConfigError(
            f"--{_SIZE} {size} is for layers of a GPT, and the pattern is {pattern!r}; write W for attention in a "
            f"window, and give --{_WINDOW} {window}"
        )
    values[_PATTERN] = _with_windows(pattern, None if freq is None else str(freq))


def _window(text: str) -> int | None:
    """Return the number of tokens that a query sees, its own included; None for all."""
    match = _BEFORE_AND_AFTER.fullmatch(text)
    before, after = (int(match[1]), int(match[2])) if match is not None else (0, None)
    if after not in (0, -1) or (after == -1 and before != -1):
        raise ConfigError(f"--{_SIZE} {text!r} must be the tokens before a query and 0 after it, as in 127,0")
    return None if before == -1 else before + 1


def _with_windows(pattern: str, text: str | None) -> str:
    mixers, freq = pattern[::2], None if text is None else parse_layer_freq(text, f"--{_SKIP_FREQ}")
    try:
        letters = windowed_letters(mixers, freq)
    except ValueError:
        raise ConfigError(
            f"--{_SKIP_FREQ} {text} does not fit {len(mixers)} layers; give a number of layers, or 0 or 1 for each of "
            "them"
        ) from None
    return "".join(map("".join, zip(letters, pattern[1::2], strict=True)))
