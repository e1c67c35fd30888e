"""Layer patterns in Megatron-LM's notation."""

from __future__ import annotations

from megatron_ext.errors import ConfigError

GPT = "gpt"
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


def gpt_pattern(count: int) -> str:
    """Return the pattern of a GPT of `count` layers."""
    return "*-" * count


def is_gpt_pattern(pattern: str) -> bool:
    """Return whether each pair of layers makes one GPT layer: attention or a replacement for it, and an MLP."""
    mixers, mlps = pattern[::2], pattern[1::2]
    return len(mixers) == len(mlps) and set(mixers) <= {"*", "W", _RECURRENT} and set(mlps) <= {"-"}


def gpt_layers(pattern: str) -> int | None:
    """Return the number of GPT layers of a pattern; None if it is not a GPT's."""
    return len(pattern) // 2 if is_gpt_pattern(pattern) else None
