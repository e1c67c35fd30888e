"""Architecture of a model: fields that have been checked, and its kind of recurrent layers."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ext.config.checks import bounds_of, flag_of, require
from megatron_ext.config.layers.letters import LAYER_SYMBOLS
from megatron_ext.config.model_checks import (
    check_attention,
    check_mlp,
    check_moe,
    check_multipliers,
    check_norms,
    check_positions,
    check_prediction,
    check_window,
)
from megatron_ext.config.model_fields import ModelFields
from megatron_ext.config.recurrent import RECURRENT_KINDS, RecurrentKind

RECURRENT_LAYERS = tuple(RECURRENT_KINDS)
# Bounds far above any real model: larger values are mistakes, or attempts to exhaust resources (SE-1).
MAX_LAYERS = 4096
LARGEST_SIZE = 2**24  # of every dimension and count


@dataclass(frozen=True)
class ModelConfig(ModelFields):
    """Model architecture, as saved with a checkpoint and used to build the model; its fields agree with each other.

    Raises:
        ConfigError: Fields are invalid, or contradict each other.
    """

    def __post_init__(self) -> None:
        self._check_pattern()
        self._check_sizes()
        kind = self.recurrent_layer
        require(
            kind in RECURRENT_LAYERS, f"--recurrent-layer {kind!r} is unknown; one of {', '.join(RECURRENT_LAYERS)}"
        )
        check_attention(self)
        check_prediction(self)
        check_window(self)
        check_positions(self)
        if self.is_hybrid:
            self.recurrent.check(self)
        check_moe(self)
        check_norms(self)
        for known in RECURRENT_KINDS.values():
            if known.check_values is not None:
                known.check_values(self)
        check_mlp(self)
        check_multipliers(self)

    def _check_pattern(self) -> None:
        pattern = self.hybrid_override_pattern
        require(len(pattern) > 0, "the hybrid pattern is empty; give at least one layer, as in 'M-*-'")
        require(len(pattern) <= MAX_LAYERS, f"a model of {len(pattern)} layers must have at most {MAX_LAYERS}")
        unknown = sorted(set(pattern) - set(LAYER_SYMBOLS))
        known = ", ".join(f"{symbol} ({name})" for symbol, name in LAYER_SYMBOLS.items())
        require(
            not unknown,
            f"pattern {pattern!r} has unknown letter {''.join(unknown)!r}; known are {known}, "
            "and all recurrent layers are of one kind, --recurrent-layer",
        )
        require(
            self.num_layers in (None, len(pattern)),
            f"--num-layers {self.num_layers} contradicts --hybrid-override-pattern {pattern!r} "
            f"of {len(pattern)} layers; leave --num-layers out or make them equal",
        )

    def _check_sizes(self) -> None:
        bounds = bounds_of(type(self))
        for name, value in self.to_dict().items():
            if not isinstance(value, int) or isinstance(value, bool):
                continue
            largest = bounds.get(name, LARGEST_SIZE)
            require(value <= largest, f"{flag_of(name)} {_digits(value)} must be at most {largest}")
            require(value > 0, f"{flag_of(name)} {_digits(value)} must be positive")

    @property
    def recurrent(self) -> RecurrentKind:
        """Record of the model's kind of recurrent layers."""
        return RECURRENT_KINDS[self.recurrent_layer]

    @property
    def scan_chunk_size(self) -> int:
        """Tokens of a chunk of recurrent layers; at inference the maximum, see `memory.budget`."""
        return self.recurrent.chunk_size(self)


def _digits(value: int) -> str:
    return str(value) if abs(value) < 10**18 else "of more than 18 digits"
