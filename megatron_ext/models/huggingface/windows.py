"""Sliding windows of attention in a decoded `config.json`: the layers that have one, and its length.

A query attends to as many tokens as the window is long, its own token the last of them.
"""

from __future__ import annotations

from megatron_ext.errors import ConfigError
from megatron_ext.models.huggingface.fields import Fields, flag, layer_count, names, size
from megatron_ext.models.huggingface.layer_letters import check_count, listed_letters

WINDOW = "sliding_window"
_SWITCH, _KINDS, _FIRST = "use_sliding_window", "layer_types", "max_window_layers"
SWITCHED_FIELDS = frozenset((WINDOW, _SWITCH))
LISTED_FIELDS = SWITCHED_FIELDS | names("layer_types max_window_layers")

_LETTERS = {"full_attention": "*", "sliding_attention": "W"}
_DEFAULT_FIRST = 28  # default of transformers


def window_of(fields: Fields, letters: str) -> dict[str, object]:
    """Return `attention_window` of a model whose attention layers have these letters."""
    return {"attention_window": size(fields, WINDOW)} if "W" in letters else {}


def mixers_alike(fields: Fields) -> str:
    """Return W for all layers if there is a `sliding_window`, * for all if it is null."""
    return ("*" if fields.get(WINDOW) is None else "W") * layer_count(fields)


def mixers_if_switched(fields: Fields) -> str:
    """Return the letters as `mixers_alike`, but * for all unless `use_sliding_window` is true."""
    return mixers_alike(fields) if flag(fields, _SWITCH, default=False) else "*" * layer_count(fields)


def mixers_listed(fields: Fields) -> str:
    """Return W for the layers that `layer_types` lists as sliding, or for those from `max_window_layers` on.

    Raises:
        ConfigError: Unknown layer kinds, a wrong number of them, or sliding layers without a window length.
    """
    is_on, count, first = flag(fields, _SWITCH, default=False), layer_count(fields), fields.get(_FIRST, _DEFAULT_FIRST)
    if type(first) is not int or first < 0:
        raise ConfigError(f"config.json: {_FIRST} = {first!r} is not supported; it must be a number of layers")
    if fields.get(_KINDS) is None:
        full = min(first, count) if is_on and fields.get(WINDOW) is not None else count
        return "*" * full + "W" * (count - full)
    letters = listed_letters(fields, _KINDS, _LETTERS)
    check_count(count, letters, _KINDS)
    if "W" in letters and not is_on:
        raise ConfigError(f"config.json: {_KINDS} has 'sliding_attention', and {_SWITCH} is false")
    return letters
