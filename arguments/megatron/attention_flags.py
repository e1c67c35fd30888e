"""Attention from Megatron-LM's flags: windows in some layers of a GPT, and positions of type yarn."""

from __future__ import annotations

import re

from arguments.megatron.layer_flags import CHECKPOINTS
from arguments.parsed_flags import ParsedFlags
from megatron_ext.config.layers.layer_freq import parse_layer_freq, windowed_letters
from megatron_ext.config.layers.pattern import YARN, is_gpt_pattern
from megatron_ext.errors import ConfigError

_POSITIONS, _FACTOR, _PATTERN = "position-embedding-type", "rotary-scaling-factor", "hybrid-override-pattern"
_YARN_KEYS = (
    _FACTOR,
    "yarn-original-max-position-embeddings",
    "yarn-beta-fast",
    "yarn-beta-slow",
    "mscale",
    "mscale-all-dim",
    "yarn-correction-range-round-to-int",
)
_SIZE, _FREQ, _WINDOW = "window-size", "window-attn-skip-freq", "attention-window"
_BEFORE_AND_AFTER = re.compile(r"\(?\s*(-1|\d{1,9})\s*,\s*(-1|\d{1,9})\s*\)?")


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
    size, freq = values.pop(_SIZE, None), values.pop(_FREQ, None)
    window = None if size is None else _window(str(size))
    if window is None and size is not None and CHECKPOINTS & values.keys():
        values[_WINDOW], given.typed[_WINDOW] = None, f"--{_SIZE} {size}"  # compared with the checkpoint's
        size = None
    if window is None:
        for key, value in ((_SIZE, size), (_FREQ, freq)):
            if value is not None:
                given.without_effect.note(f"--{key}")
        return
    if values.setdefault(_WINDOW, window) != window:
        raise ConfigError(f"--{_SIZE} {size} and --{_WINDOW} {values[_WINDOW]} contradict each other; give one of them")
    given.typed[_WINDOW] = f"--{_SIZE} {size}"
    pattern = values.get(_PATTERN)
    if pattern is None:  # a checkpoint's layers have windows, or have none
        if freq is not None:
            given.without_effect.note(f"--{_FREQ}")
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
    mixers, freq = pattern[::2], None if text is None else parse_layer_freq(text, f"--{_FREQ}")
    try:
        letters = windowed_letters(mixers, freq)
    except ValueError:
        raise ConfigError(
            f"--{_FREQ} {text} does not fit {len(mixers)} layers; give a number of layers, or 0 or 1 for each of them"
        ) from None
    return "".join(map("".join, zip(letters, pattern[1::2], strict=True)))
