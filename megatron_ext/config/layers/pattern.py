"""Layer patterns in Megatron-LM's notation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from megatron_ext.errors import ConfigError

GPT = "gpt"
YARN = "yarn"  # Megatron's position embedding type of rope with stretched wavelengths
MODEL_PROVIDERS = (GPT, "hybrid", "mamba")  # "mamba" is the old name of "hybrid"
_STAGE, _PREDICTION = "|", "/"  # between pipeline stages; before multi-token prediction layers
_DELTA_NET, _RECURRENT = "G", "M"
_MISSING = {
    "D": "sparse attention over latents",
    "C": "compressed sparse attention",
    "H": "heavily compressed attention",
    "W": "attention in a window of Megatron's",
    "+": "multi-latent attention",
}


def read_pattern(text: str) -> tuple[str, str | None]:
    """Translate a pattern from Megatron's flags and checkpoints to this package's letters.

    Marks of pipeline stages are dropped, layers of multi-token prediction cut off. A G is a recurrent layer.

    Returns:
        One letter a layer, and the kind of the recurrent layers; None if the pattern does not say it.

    Raises:
        ConfigError: The pattern has unsupported layers, or recurrent layers of two kinds.
    """
    pattern = text.replace(_STAGE, "").partition(_PREDICTION)[0]
    for letter, name in _MISSING.items():
        if letter in pattern:
            raise ConfigError(
                f"pattern {text!r} has a layer {letter!r}, {name}, which is not there; M, G, *, - and E are"
            )
    if _DELTA_NET not in pattern:
        return pattern, None
    if _RECURRENT in pattern:
        raise ConfigError(f"pattern {text!r} has M and G; all recurrent layers of a model are of one kind")
    return pattern.replace(_DELTA_NET, _RECURRENT), "gated_delta_net"


def prediction_pattern(text: str) -> tuple[str, int]:
    """Return the pattern of one layer of multi-token prediction in a pattern of Megatron's, and the number of depths.

    Raises:
        ConfigError: The depths differ.
    """
    depths = text.split(_PREDICTION)[1:]
    if len(set(depths)) > 1:
        raise ConfigError(f"pattern {text!r} has layers of multi-token prediction that differ; they must be equal")
    return (depths[0].replace(_DELTA_NET, _RECURRENT), len(depths)) if depths else ("", 0)


def pattern_from_ratios(count: int, attention_ratio: float, mlp_ratio: float) -> str:
    """Return the pattern of a hybrid model that Megatron's former flags describe by fractions of its layers.

    Attention layers are spread evenly between recurrent ones, which begin and end the model; then MLPs replace
    recurrent layers, the last one included.

    Args:
        count: Number of layers.
        attention_ratio: Fraction of attention layers, 0 to 1.
        mlp_ratio: Fraction of MLPs, 0 to 1; the sum of both is at most 1.
    """
    attention, mlps = round(count * attention_ratio), round(count * mlp_ratio)
    letters = [_RECURRENT] * count
    for place in _evenly(range(count), (count - attention) / (attention + 1)):
        letters[place] = "*"
    if mlps:
        recurrent = [place for place, letter in enumerate(letters) if letter == _RECURRENT]
        for place in _evenly(recurrent, (len(recurrent) - mlps) / mlps):
            letters[place] = "-"
    return "".join(letters)


def _evenly(places: Iterable[int], gap: float) -> Iterator[int]:
    """Choose places with `gap` others before each; summed in floats, whose rounding Megatron's models depend on."""
    others = gap
    for place in places:
        is_due = others < 0.5
        others += gap if is_due else -1.0
        if is_due:
            yield place


def gpt_pattern(mlps: str) -> str:
    """Return the pattern of a GPT.

    Args:
        mlps: For each layer - (an MLP) or E (experts).
    """
    return "".join(f"*{letter}" for letter in mlps)


def is_gpt_pattern(pattern: str) -> bool:
    """Return whether each pair of layers makes one GPT layer: attention or a replacement for it, and MLP or experts."""
    mixers, mlps = pattern[::2], pattern[1::2]
    return len(mixers) == len(mlps) and set(mixers) <= {"*", "W", _RECURRENT} and set(mlps) <= {"-", "E"}


def gpt_layers(pattern: str) -> int | None:
    """Return the number of GPT layers of a pattern; None if it is not a GPT's."""
    return len(pattern) // 2 if is_gpt_pattern(pattern) else None
