"""Sliding windows of attention in a decoded `config.json`.

A query sees so many tokens, its own the last of them. A window that no sequence is longer than has no effect; whether
one is, is known when flags have said how long sequences may be, see `config.layers.attention.check_window`.
"""

from __future__ import annotations

from megatron_ext.errors import ConfigError
from megatron_ext.models.huggingface.fields import Fields, flag, layer_count, names, size
from megatron_ext.models.huggingface.layers import check_count, listed_letters

WINDOW = "sliding_window"
_SWITCH, _KINDS, _FIRST = "use_sliding_window", "layer_types", "max_window_layers"
SWITCHED_FIELDS = frozenset((WINDOW, _SWITCH))
LISTED_FIELDS = SWITCHED_FIELDS | names("layer_types max_window_layers")

_LETTERS = {"full_attention": "*", "sliding_attention": "W"}
_DEFAULT_FIRST = 28  # transformers'


def window_of_all(fields: Fields) -> dict[str, object]:
    """`attention_window` where all layers have the window if there is one: `sliding_window`, or null."""
    return {"attention_window": None if fields.get(WINDOW) is None else size(fields, WINDOW)}


def switched_window(fields: Fields) -> dict[str, object]:
    """The same where `use_sliding_window` says whether they have it."""
    return window_of_all(fields) if flag(fields, _SWITCH, default=False) else {}


def listed_window(fields: Fields) -> dict[str, object]:
    """The same where `layer_types` says which layers have it, or else those from `max_window_layers` on.

    Raises:
        ConfigError: Other kinds of layers, another number of them, or a window that some have and that is not said.
    """
    is_on = flag(fields, _SWITCH, default=False)
    if not _has_windows(fields, is_on):
        return {}
    if not is_on:
        raise ConfigError(f"config.json: {_KINDS} has 'sliding_attention', and {_SWITCH} is false")
    return {"attention_window": size(fields, WINDOW)}


def _has_windows(fields: Fields, is_on: bool) -> bool:
    count, first = layer_count(fields), fields.get(_FIRST, _DEFAULT_FIRST)
    if type(first) is not int or first < 0:
        raise ConfigError(f"config.json: {_FIRST} = {first!r} is not supported; it must be a number of layers")
    if fields.get(_KINDS) is None:
        return is_on and fields.get(WINDOW) is not None and first < count
    letters = listed_letters(fields, _KINDS, _LETTERS)
    check_count(count, letters, _KINDS)
    return "W" in letters
