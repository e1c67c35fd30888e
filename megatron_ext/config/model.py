"""Architecture of a model: the fields of its layers and of the whole stack."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from megatron_ext.config.checks import bounds_of, flag_of, require
from megatron_ext.config.layers.attention import check_attention, check_window
from megatron_ext.config.layers.letters import LAYER_SYMBOLS, is_recurrent
from megatron_ext.config.layers.mlp import check_mlp
from megatron_ext.config.layers.moe import MoeFields, check_moe
from megatron_ext.config.layers.multipliers import MultiplierFields, check_multipliers
from megatron_ext.config.layers.positions import LEARNED_POSITIONS, PositionFields, check_positions
from megatron_ext.config.layers.stack import check_norms
from megatron_ext.config.recurrent import RECURRENT_KINDS, RecurrentFields, RecurrentKind

RECURRENT_LAYERS = tuple(RECURRENT_KINDS)
# Bounds far above any real model: larger values are mistakes, or attempts to exhaust resources (SE-1).
MAX_LAYERS = 4096
LARGEST_SIZE = 2**24  # of every dimension and count


@dataclass(frozen=True)
class ModelConfig(MultiplierFields, PositionFields, MoeFields, RecurrentFields):
    """Model architecture, as saved with a checkpoint and used to build the model. Defaults: a tiny hybrid."""

    hybrid_override_pattern: str = "M-M*M-M-"  # one letter a layer, see LAYER_SYMBOLS
    recurrent_layer: str = RECURRENT_LAYERS[0]  # what an M in the pattern is
    num_layers: int | None = None  # default: the pattern's length
    untie_embeddings_and_output_weights: bool = False
    vocab_size: int | None = None  # default: the tokenizer's
    spec: tuple[str, str] | None = None  # (module, name) of a stack spec; default: ours

    def __post_init__(self) -> None:
        self._check_pattern()
        self._check_sizes()
        kind = self.recurrent_layer
        require(
            kind in RECURRENT_LAYERS, f"--recurrent-layer {kind!r} is unknown; one of {', '.join(RECURRENT_LAYERS)}"
        )
        check_attention(self)
        check_window(self, self.hybrid_override_pattern)
        check_positions(self)
        if self.is_hybrid:
            self.recurrent.check(self)
        check_moe(self, self.hybrid_override_pattern)
        check_norms(self)
        for known in RECURRENT_KINDS.values():
            if known.check_values is not None:
                known.check_values(self)
        check_mlp(self)
        positions = self.position_embedding_type
        check_multipliers(self, is_gated=self.swiglu, has_learned_positions=positions == LEARNED_POSITIONS)

    def _check_pattern(self) -> None:
        pattern = self.hybrid_override_pattern
        require(len(pattern) > 0, "the hybrid pattern is empty; give at least one layer, as in 'M-*-'")
        require(len(pattern) <= MAX_LAYERS, f"{len(pattern)} layers are too many; a model may have {MAX_LAYERS}")
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
            require(value <= largest, f"{flag_of(name)} {_digits(value)} is too large; at most {largest} would do")
            require(value > 0, f"{flag_of(name)} {_digits(value)} must be positive")

    @property
    def recurrent(self) -> RecurrentKind:
        """Record of the model's kind of recurrent layers."""
        return RECURRENT_KINDS[self.recurrent_layer]

    @property
    def is_moe(self) -> bool:
        """True if any layer is a mixture of experts."""
        return "E" in self.hybrid_override_pattern

    @property
    def is_hybrid(self) -> bool:
        """True if any layer carries a recurrent state."""
        return any(map(is_recurrent, self.hybrid_override_pattern))

    @property
    def scan_chunk_size(self) -> int:
        """Tokens of a chunk of recurrent layers; at inference the maximum, see `memory.budget`."""
        return self.recurrent.chunk_size(self)

    @property
    def layer_count(self) -> int:
        """Number of layers of all kinds."""
        return len(self.hybrid_override_pattern)

    def to_dict(self) -> dict[str, object]:
        """Return the fields as a plain dictionary, as saved with a checkpoint."""
        return dataclasses.asdict(self)


def _digits(value: int) -> str:
    return str(value) if abs(value) < 10**18 else "of more than 18 digits"
