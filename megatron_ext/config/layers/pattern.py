"""Patterns of layers as Megatron-LM writes them."""

from __future__ import annotations

from megatron_ext.errors import ConfigError

GPT = "gpt"
MODEL_PROVIDERS = (GPT, "hybrid", "mamba")  # the last is the old name of the second
_STAGE, _PREDICTION = "|", "/"  # between pipeline stages; before what predicts further tokens
_DELTA_NET, _RECURRENT = "G", "M"
_MISSING = {
    "D": "sparse attention over latents",
    "C": "compressed sparse attention",
    "H": "heavily compressed attention",
    "W": "attention in a window of Megatron's",
    "+": "multi-latent attention",
}


def read_pattern(text: str) -> tuple[str, str | None]:
    """A pattern as Megatron's flags and checkpoints have it, in letters of ours.

    Marks of pipeline stages are dropped, layers of multi-token prediction cut off. A G is a recurrent layer.

    Returns:
        One letter a layer, and the kind of the recurrent ones where the pattern says it.

    Raises:
        ConfigError: It has layers of a kind that is not there, or recurrent layers of two kinds.
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


def gpt_pattern(count: int) -> str:
    """The pattern of a GPT of so many layers."""
    return "*-" * count


def is_gpt_pattern(pattern: str) -> bool:
    """Whether each two layers are one of a GPT: attention, or what stands in its place, and an MLP."""
    mixers, mlps = pattern[::2], pattern[1::2]
    return len(mixers) == len(mlps) and set(mixers) <= {"*", "W", _RECURRENT} and set(mlps) <= {"-"}


def gpt_layers(pattern: str) -> int | None:
    """How many layers a GPT of that pattern has; None if it is none."""
    return len(pattern) // 2 if is_gpt_pattern(pattern) else None
