"""Which of their tensors make up which of ours, as tables.

A tensor of ours comes from one of theirs, or from several:

- as a rule they stand one below the other: gate and up projection of a gated MLP, the gate first;
- where they do not, a `Conversion` says how their rows are put together.
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
EXPERT = "{expert}"  # in names: each expert's number in turn


@dataclass(frozen=True)
class Conversion:
    """How tensors of theirs make up one of ours where they do not simply stand one below the other.

    Attributes:
        rows: Rows of each of theirs; their further dimensions are those of ours.
        convert: Theirs, in the order of the table, to ours; any floating point type.
        revert: Ours to theirs, in the same order; None: there is no way back, and no export.
    """

    rows: Callable[[ModelConfig], Sequence[int]]
    convert: Callable[[Sequence[Tensor], ModelConfig], Tensor]
    revert: Callable[[Tensor, ModelConfig], Sequence[Tensor]] | None = None


@dataclass(frozen=True)
class Source:
    """What a tensor of ours comes from.

    Attributes:
        names: Of theirs.
        conversion: None if they stand one below the other, in equal parts.
        needs: Field or property of `ModelConfig` without which (None, False) neither side has the tensor; None if both
            always have it.
    """

    names: tuple[str, ...]
    conversion: Conversion | None = None
    needs: str | None = None


LayerTable = Mapping[str, Source]  # ours to theirs, both below the names of their layers


@dataclass(frozen=True)
class Joined:
    """A tensor that files may have in parts, one below the other and cut anywhere.

    Attributes:
        expression: Regular expression of the whole names of parts, with prefix.
        whole: Name of the tensor, as `re.Match.expand` takes it.
        parts: Names of all parts, in order, likewise.
    """

    expression: str
    whole: str
    parts: tuple[str, ...]


@dataclass(frozen=True)
class TensorTable:
    """Where the tensors of a family's checkpoints go. Names of theirs are without prefix.

    Attributes:
        layers: For each letter of a pattern ours below `decoder.layers.N.` to theirs below `layers.M.`.
        letters_per_layer: Letters that a layer of theirs is: M is N divided by it.
        embedding: Name of the embedding.
        final_norm: Name of the norm after the last layer.
        prefixes: Beginnings of names that may be there or not.
        ignored: Regular expression of whole names that are passed over.
        split: Regular expressions of whole names, with prefix, of tensors that are shown as slices along their first
            dimension, to the names of those (as `re.Match.expand` takes them), with `{index}` for the slice's number.
        joined: Tensors that files may have in parts.
        other_names: Regular expressions of whole names, to the names in this table (as `re.Match.expand` takes them).
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

    def known_name(self, name: str) -> str:
        """A name of theirs as it is here, without prefix."""
        prefix = next((prefix for prefix in self.prefixes if name.startswith(prefix)), "")
        bare = name.removeprefix(prefix)
        matches = ((re.fullmatch(expression, bare), known) for expression, known in self.other_names.items())
        return next((match.expand(known) for match, known in matches if match is not None), bare)

    def joined_names(self, names: Iterable[str]) -> dict[str, list[str]]:
        """The tensors that are there in parts, to the parts' names; some of those may be missing."""
        found: dict[str, list[str]] = {}
        for one in self.joined:
            expression = re.compile(one.expression)
            for match in filter(None, map(expression.fullmatch, sorted(names))):
                found[match.expand(one.whole)] = [match.expand(part) for part in one.parts]
        return found

    def sources(self, config: ModelConfig) -> dict[str, Source]:
        """What each tensor of a model comes from."""
        sources = {EMBEDDING: Source((self.embedding,))}
        for index, letter in enumerate(config.hybrid_override_pattern):
            ours, theirs = f"decoder.layers.{index}", f"layers.{index // self.letters_per_layer}"
            for name, source in _of_layer(self.layers[letter], config):
                sources[f"{ours}.{name}"] = replace(source, names=tuple(f"{theirs}.{one}" for one in source.names))
        sources[FINAL_NORM] = Source((self.final_norm,))
        if config.untie_embeddings_and_output_weights:
            sources[OUTPUT] = Source((LM_HEAD,))
        return sources


def _of_layer(table: LayerTable, config: ModelConfig) -> Iterator[tuple[str, Source]]:
    """The tensors that a layer of this model has, those of each expert by its number."""
    for name, source in table.items():
        if source.needs is not None and getattr(config, source.needs) in (None, False):
            continue
        if EXPERT not in name:
            yield name, source
            continue
        for expert in map(str, range(config.num_experts or 0)):
            names = tuple(one.replace(EXPERT, expert) for one in source.names)
            yield name.replace(EXPERT, expert), replace(source, names=names)
