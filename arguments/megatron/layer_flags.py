"""Layer patterns from Megatron-LM's flags: a pattern, a count of GPT layers, or ratios of kinds."""

from __future__ import annotations

from typing import Any

from arguments.parsed_flags import ParsedFlags
from megatron_ext.config import MAX_LAYERS
from megatron_ext.config.layers.pattern import GPT, gpt_pattern, is_gpt_pattern, pattern_from_ratios, read_pattern
from megatron_ext.errors import ConfigError

_PATTERN, _COUNT, _PROVIDER = "hybrid-override-pattern", "num-layers", "model-provider"
_RATIOS = ("hybrid-attention-ratio", "hybrid-mlp-ratio")


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
        pattern, recurrent_layer = read_pattern(values[_PATTERN])
        values[_PATTERN] = pattern
        if recurrent_layer is not None:
            _set_recurrent_layer(values, recurrent_layer)
        if values.get(_COUNT, len(pattern)) != len(pattern):
            given.without_effect.note(f"--{_COUNT}")
            del values[_COUNT]
        for name, ratio in zip(_RATIOS, ratios, strict=True):
            if ratio:
                given.without_effect.note(f"--{name}")
    elif any(ratios):
        values[_PATTERN] = _allocated(values.get(_COUNT), *ratios)
    if values.get(_PROVIDER) == GPT:
        _describe_gpt(values)


def _set_recurrent_layer(values: dict[str, Any], kind: str) -> None:
    if values.setdefault("recurrent-layer", kind) != kind:
        raise ConfigError(
            f"--recurrent-layer {values['recurrent-layer']} contradicts the pattern, in which G stands for {kind}; "
            "leave it out"
        )


def _describe_gpt(values: dict[str, Any]) -> None:
    if "num-experts" in values:
        raise ConfigError(
            f"--num-experts {values['num-experts']} with --model-provider {GPT} is refused: GPT models with experts "
            "are not supported; use a hybrid pattern with E layers"
        )
    if _PATTERN in values:
        if not is_gpt_pattern(values[_PATTERN]):
            raise ConfigError(
                f"--model-provider {GPT} and --{_PATTERN} {values[_PATTERN]!r} contradict each other: each layer of a "
                "GPT is an attention and an MLP; give --model-provider hybrid"
            )
    elif not {"load", "load-hf"} & values.keys():
        if _COUNT not in values:
            raise ConfigError(f"--model-provider {GPT} needs --{_COUNT}, or a checkpoint (--load, --load-hf)")
        values[_PATTERN] = gpt_pattern(values.pop(_COUNT))


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
