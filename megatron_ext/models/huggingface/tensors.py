"""Tensor tables: the mapping from their tensors to ours.

A tensor of ours is made from one of theirs, or from several:

- by default they are concatenated by rows: gate and up projection of a gated MLP, the gate first;
- otherwise a `Conversion` defines the order of their rows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from megatron_ext.config import ModelConfig

EMBEDDING = "embedding.word_embeddings.weight"
FINAL_NORM = "decoder.final_norm.weight"
OUTPUT = "output_layer.weight"
LM_HEAD = "lm_head.weight"
EXPERT = "{expert}"  # placeholder in names for each expert's number


@dataclass(frozen=True)
class Conversion:
    """Conversion of tensors of theirs to one of ours, if it is not a concatenation by rows.

    Attributes:
        rows: Returns the rows of each of their tensors; all further dimensions equal ours.
        convert: Theirs, in the order of the table, to ours; any floating point type.
        revert: Ours to theirs, in the same order; None disables the export.
        is_transposed: Whether theirs are matrices whose columns are the `rows`.
    """

    rows: Callable[[ModelConfig], Sequence[int]]
    convert: Callable[[Sequence[Tensor], ModelConfig], Tensor]
    revert: Callable[[Tensor, ModelConfig], Sequence[Tensor]] | None = None
    is_transposed: bool = False


@dataclass(frozen=True)
class Source:
    """Source of a tensor of ours.

    Attributes:
        names: Names of their tensors.
        conversion: None if they are concatenated by rows, in equal parts.
        needs: Field or property of `ModelConfig` without which (None, False) neither side has the tensor; None if both
            always have it.
    """

    names: tuple[str, ...]
    conversion: Conversion | None = None
    needs: str | None = None


LayerTable = Mapping[str, Source]  # ours -> theirs, both without the prefix of the layer


@dataclass(frozen=True)
class Joined:
    """Tensor that files may store in parts, split by rows at any position.

    Attributes:
        expression: Regular expression of the whole names of parts, with prefix.
        whole: Name of the tensor, as a template of `re.Match.expand`.
        parts: Names of all parts, in order, as such templates.
    """

    expression: str
    whole: str
    parts: tuple[str, ...]


@dataclass(frozen=True)
class PredictionTable:
    """Names of the only layer of multi-token prediction in a family's checkpoints.

    Attributes:
        names: Ours below `mtp.layers.0.` -> theirs; `{last}` is the number of the last of its layers.
        layers: Prefix of its layers, `{}` being their number; they have the tensors of the trunk's.
    """

    names: Mapping[str, str]
    layers: str = "mtp.layers.{}"


@dataclass(frozen=True)
class TensorTable:
    """Tensor table of a family's checkpoints. Their names are without prefix.

    Attributes:
        layers: For each letter of a pattern: ours below `decoder.layers.N.` -> theirs below `layers.M.`.
        letters_per_layer: Letters per layer of theirs: M is N divided by this number.
        embedding: Name of the embedding.
        final_norm: Name of the norm after the last layer.
        prefixes: Optional prefixes of names.
        ignored: Regular expression of whole names that are skipped.
        split: Regular expressions of whole names, with prefix, of tensors that are shown as slices along their first
            dimension -> names of the slices (templates of `re.Match.expand`), with `{index}` for the slice's number.
        joined: Tensors that files may store in parts.
        other_names: Regular expressions of whole names -> names in this table (templates of `re.Match.expand`).
        prediction: Names of multi-token prediction; None for families without.
    """

    layers: Mapping[str, LayerTable]
    letters_per_layer: int = 1
    embedding: str = "embed_tokens.weight"
    final_norm: str = "norm.weight"
    prefixes: tuple[str, ...] = ("model.",)
    ignored: str | None = None
    split: Mapping[str, str] = field(default_factory=dict)
    joined: tuple[Joined, ...] = ()
    other_names: Mapping[str, str] = field(default_factory=dict)
    prediction: PredictionTable | None = None

    def known_name(self, name: str) -> str:
        """Return the name in this table of a tensor of theirs, without prefix."""
        prefix = next((prefix for prefix in self.prefixes if name.startswith(prefix)), "")
        bare = name.removeprefix(prefix)
        matches = ((re.fullmatch(expression, bare), known) for expression, known in self.other_names.items())
        return next((match.expand(known) for match, known in matches if match is not None), bare)

    def joined_names(self, names: Iterable[str]) -> dict[str, list[str]]:
        """Return the tensors that are stored in parts, each with its parts' names; some parts may be missing."""
        found: dict[str, list[str]] = {}
        for one in self.joined:
            expression = re.compile(one.expression)
            for match in filter(None, map(expression.fullmatch, sorted(names))):
                found[match.expand(one.whole)] = [match.expand(part) for part in one.parts]
        return found

    def sources(self, config: ModelConfig) -> dict[str, Source]:
        """Return the source of each tensor of a model."""
        sources = {EMBEDDING: Source((self.embedding,))}
        for index, letter in enumerate(config.hybrid_override_pattern):
            ours, theirs = f"decoder.layers.{index}", f"layers.{index // self.letters_per_layer}"
            sources |= self._layer(letter, config, ours, theirs)
        sources[FINAL_NORM] = Source((self.final_norm,))
        if config.untie_embeddings_and_output_weights:
            sources[OUTPUT] = Source((LM_HEAD,))
        if self.prediction is not None and config.mtp_num_layers:
            sources |= self._prediction(self.prediction, config)
        return sources

    def _layer(self, letter: str, config: ModelConfig, ours: str, theirs: str) -> dict[str, Source]:
        """Return the sources of one layer, from its prefixes."""
        return {
            f"{ours}.{name}": replace(source, names=tuple(f"{theirs}.{one}" for one in source.names))
            for name, source in _of_layer(self.layers[letter], config)
        }

    def _prediction(self, table: PredictionTable, config: ModelConfig) -> dict[str, Source]:
        pattern, prefix = config.mtp_pattern, "mtp.layers.0"
        last = (len(pattern) - 1) // self.letters_per_layer
        sources = {f"{prefix}.{name}": Source((one.format(last=last),)) for name, one in table.names.items()}
        for index, letter in enumerate(pattern):
            ours = f"{prefix}.mtp_model_layer.layers.{index}"
            sources |= self._layer(letter, config, ours, table.layers.format(index // self.letters_per_layer))
        return sources


def _of_layer(table: LayerTable, config: ModelConfig) -> Iterator[tuple[str, Source]]:
    """Yield the tensors of a layer of this model, with one entry for each expert."""
    for name, source in table.items():
        if source.needs is not None and getattr(config, source.needs) in (None, False):
            continue
        if EXPERT not in name:
            yield name, source
            continue
        for expert in map(str, range(config.num_experts or 0)):
            names = tuple(one.replace(EXPERT, expert) for one in source.names)
            yield name.replace(EXPERT, expert), replace(source, names=names)
