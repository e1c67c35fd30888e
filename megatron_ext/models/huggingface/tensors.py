"""Tensor tables: the mapping from their tensors to ours, and tables of layer components, which families combine.

A tensor of ours is made from one of theirs, or from several:

- by default they are concatenated by rows: gate and up projection of a gated MLP, the gate first;
- otherwise a `Conversion` defines the number or the order of their rows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from megatron_ext.config import ModelConfig
from megatron_ext.errors import ConfigError

EMBEDDING = "embedding.word_embeddings.weight"
FINAL_NORM = "decoder.final_norm.weight"
OUTPUT = "output_layer.weight"
LM_HEAD = "lm_head.weight"
EXPERT = "{expert}"  # placeholder in names for each expert's number


@dataclass(frozen=True)
class Conversion:
    """Conversion of tensors of theirs to one of ours.

    Attributes:
        rows: Returns the rows of each of their tensors; all further dimensions equal ours.
        convert: Theirs, in the order of the table, to ours; any floating point type. None for a concatenation by rows.
        revert: Ours to theirs, in the same order; None disables the export, unless it is a concatenation.
        is_transposed: Whether files have the matrices transposed, so that their columns are the `rows`.
    """

    rows: Callable[[ModelConfig], Sequence[int]]
    convert: Callable[[Sequence[Tensor], ModelConfig], Tensor] | None = None
    revert: Callable[[Tensor, ModelConfig], Sequence[Tensor]] | None = None
    is_transposed: bool = False


@dataclass(frozen=True)
class Source:
    """Source of a tensor of ours.

    Attributes:
        conversion: None if they are concatenated by rows, in equal parts.
        needs: Field or property of `ModelConfig` without which (None, False) neither side has the tensor; None if both
            always have it.
    """

    names: tuple[str, ...]
    conversion: Conversion | None = None
    needs: str | None = None

    @property
    def is_concatenation(self) -> bool:
        """True if theirs make up ours one after the other, by rows."""
        return self.conversion is None or self.conversion.convert is None

    def shapes(self, shape: tuple[int, ...], config: ModelConfig) -> Sequence[tuple[int, ...]]:
        """Return the shapes of their tensors that make up one of `shape`, which may have no dimension."""
        count = len(self.names)
        if self.conversion is None:
            return [shape] if count == 1 else [(shape[0] // count, *shape[1:])] * count
        parts = [(row, *shape[1:]) for row in self.conversion.rows(config)]
        return [part[::-1] for part in parts] if self.conversion.is_transposed else parts

    def make(self, parts: Sequence[Tensor], config: ModelConfig) -> Tensor:
        """Return ours, made from theirs."""
        if self.conversion is None or self.conversion.convert is None:
            return parts[0] if len(parts) == 1 else torch.cat(tuple(parts))
        return self.conversion.convert([part.T for part in parts] if self.conversion.is_transposed else parts, config)

    def take_apart(self, ours: Tensor, config: ModelConfig) -> Sequence[Tensor]:
        """Return theirs, of which `make` makes ours.

        Raises:
            ConfigError: They cannot be derived.
        """
        if self.conversion is None or self.conversion.convert is None:
            if len(self.names) == 1:
                return [ours]
            return ours.split([rows for rows, *_ in self.shapes(tuple(ours.shape), config)])
        if self.conversion.revert is None:
            raise ConfigError(
                f"{self.names[0]} cannot be derived from the model's tensors; this family cannot be exported"
            )
        parts = self.conversion.revert(ours, config)
        return [part.T.contiguous() for part in parts] if self.conversion.is_transposed else parts


LayerTable = Mapping[str, Source]  # ours -> theirs, both without the prefix of the layer


@dataclass(frozen=True)
class Joined:
    """Tensor of a module that files may store in parts, split by rows at any position.

    Attributes:
        module: Regular expression of the module's name, with prefix.
        whole: Name of the tensor in the module.
        parts: Names of all parts in the module, in order.
    """

    module: str
    whole: str
    parts: tuple[str, ...]


@dataclass(frozen=True)
class TensorTable:
    """Tensor table of a family's checkpoints. Their names are without prefix.

    Attributes:
        layers: For each letter of a pattern: ours below `decoder.layers.N.` -> theirs below `layers.M.`.
        letters_per_layer: Letters per layer of theirs: M is N divided by this number.
        final_norm: Name of the norm after the last layer.
        prefixes: Optional prefixes of names.
        ignored: Regular expression of whole names that are skipped.
        split: Regular expressions of whole names, with prefix, of tensors that are shown as slices along their first
            dimension -> names of the slices (templates of `re.Match.expand`), with `{index}` for the slice's number.
        joined: Tensors that files may store in parts.
        other_names: Regular expressions of whole names -> names in this table (templates of `re.Match.expand`).
        prediction: Names of the only layer of multi-token prediction: ours below `mtp.layers.0.` -> theirs, with
            `{last}` for the number of the last of its layers, which have the trunk's tensors. None for families
            without.
    """

    layers: Mapping[str, LayerTable]
    letters_per_layer: int = 2
    embedding: str = "embed_tokens.weight"
    final_norm: str = "norm.weight"
    prefixes: tuple[str, ...] = ("model.",)
    ignored: str | None = None
    split: Mapping[str, str] = field(default_factory=dict)
    joined: tuple[Joined, ...] = ()
    other_names: Mapping[str, str] = field(default_factory=dict)
    prediction: Mapping[str, str] | None = None

    def known_name(self, name: str) -> str:
        """Return the name in this table of a tensor of theirs, without prefix."""
        prefix = next((prefix for prefix in self.prefixes if name.startswith(prefix)), "")
        bare = name.removeprefix(prefix)
        matches = ((re.fullmatch(expression, bare), known) for expression, known in self.other_names.items())
        return next((match.expand(known) for match, known in matches if match is not None), bare)

    def skips(self, bare: str) -> bool:
        """Return whether a tensor of theirs, without prefix, is skipped."""
        return self.ignored is not None and re.fullmatch(self.ignored, bare) is not None

    def slice_name(self, name: str) -> Callable[[int], str] | None:
        """Return a function from a slice's number to its name; None for a tensor that is not split."""
        for expression, template in self.split.items():
            match = re.fullmatch(expression, name)
            if match is not None:
                return lambda index: match.expand(template.replace("{index}", str(index)))
        return None

    def joined_names(self, names: Iterable[str]) -> dict[str, list[str]]:
        """Return the tensors that are stored in parts, each with its parts' names; some parts may be missing."""
        found: dict[str, list[str]] = {}
        for one in self.joined:
            expression = re.compile(rf"({one.module})\.(?:{'|'.join(map(re.escape, one.parts))})")
            for match in filter(None, map(expression.fullmatch, sorted(names))):
                found[f"{match[1]}.{one.whole}"] = [f"{match[1]}.{part}" for part in one.parts]
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
            sources |= self._prediction(config)
        return sources

    def _layer(self, letter: str, config: ModelConfig, ours: str, theirs: str) -> dict[str, Source]:
        """Return the sources of one layer, from its prefixes."""
        return {
            f"{ours}.{name}": replace(source, names=tuple(f"{theirs}.{one}" for one in source.names))
            for name, source in _of_layer(self.layers[letter], config)
        }

    def _prediction(self, config: ModelConfig) -> dict[str, Source]:
        pattern, prefix, names = config.mtp_pattern, "mtp.layers.0", self.prediction or {}
        last = (len(pattern) - 1) // self.letters_per_layer
        sources = {f"{prefix}.{name}": Source((one.format(last=last),)) for name, one in names.items()}
        for index, letter in enumerate(pattern):
            ours, theirs = f"{prefix}.mtp_model_layer.layers.{index}", f"mtp.layers.{index // self.letters_per_layer}"
            sources |= self._layer(letter, config, ours, theirs)
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


ROUTED_EXPERT = f"mlp.experts.local_experts.{EXPERT}"  # one of our routed experts
MAMBA1_TENSORS = (
    "in_proj.weight conv1d.weight conv1d.bias x_proj.weight dt_proj.weight dt_proj.bias A_log D out_proj.weight"
)
MAMBA2_TENSORS = "in_proj.weight conv1d.weight conv1d.bias A_log D dt_bias norm.weight out_proj.weight"
"""Tensors of Mamba mixers, which have the same names on both sides."""


def copied(ours: str, theirs: str, names: str) -> LayerTable:
    """Map tensors with equal names and shapes, given as a text, from a part of theirs to a part of ours."""
    return {f"{ours}.{name}": Source((f"{theirs}.{name}",)) for name in names.split()}


def weights(names: Mapping[str, str]) -> LayerTable:
    """Map weights of equal shapes, given as our part -> their part."""
    return {f"{ours}.weight": Source((f"{theirs}.weight",)) for ours, theirs in names.items()}


def attention(theirs: str) -> LayerTable:
    """Tensor table of attention, with the configured biases."""
    weight, bias = (tuple(f"{theirs}.{one}_proj.{kind}" for one in "qkv") for kind in ("weight", "bias"))
    return {
        "self_attention.linear_qkv.weight": Source(weight, QUERY_KEY_VALUE),
        "self_attention.linear_qkv.bias": Source(bias, QUERY_KEY_VALUE, needs="add_qkv_bias"),
        **weights({"self_attention.linear_proj": f"{theirs}.o_proj"}),
        "self_attention.linear_proj.bias": Source((f"{theirs}.o_proj.bias",), needs="add_attention_output_bias"),
    }


def query_and_key_norms(theirs: str) -> LayerTable:
    """Tensor table of the per-head norms of queries and keys."""
    return weights({f"self_attention.{one}_layernorm": f"{theirs}.{one}_norm" for one in "qk"})


def gated_mlp(
    ours: str, theirs: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"
) -> LayerTable:
    """Tensor table of a gated MLP, with the configured biases; ours has gate and up projection in one."""
    first = (f"{theirs}.{gate}", f"{theirs}.{up}")
    return {
        f"{ours}.linear_fc1.weight": Source(tuple(f"{one}.weight" for one in first)),
        f"{ours}.linear_fc1.bias": Source(tuple(f"{one}.bias" for one in first), needs="add_mlp_bias"),
        **weights({f"{ours}.linear_fc2": f"{theirs}.{down}"}),
        f"{ours}.linear_fc2.bias": Source((f"{theirs}.{down}.bias",), needs="add_mlp_bias"),
    }


def plain_mlp(ours: str, theirs: str, first: str = "up_proj", second: str = "down_proj") -> LayerTable:
    """Tensor table of an MLP of two matrices, the first of which may be a gate and an up projection."""
    return weights({f"{ours}.linear_fc1": f"{theirs}.{first}", f"{ours}.linear_fc2": f"{theirs}.{second}"})


def interleave_qkv(parts: Sequence[Tensor], config: ModelConfig) -> Tensor:
    """Interleave query [Hq*D, ...], key and value [Hkv*D, ...] -> [(Hq + 2*Hkv)*D, ...] in groups of [q ... q k v].

    With an output gate each head of the query matrix is followed by its gate: [Hq*2*D, ...] -> groups of [q ... q gate
    ... gate k v]. These are the layouts that megatron-core's `SelfAttention` splits.
    """
    query, key, value = parts
    if config.attention_output_gate:
        heads = query.unflatten(0, (config.num_attention_heads, 2, -1))  # [Hq, 2, D, ...]
        parts = [*(heads[:, i].flatten(0, 1) for i in range(2)), key, value]
    grouped = [matrix.unflatten(0, (config.query_groups, -1)) for matrix in parts]  # each [groups, rows, ...]
    return torch.cat(grouped, dim=1).flatten(0, 1)


def _qkv_rows(config: ModelConfig) -> Sequence[int]:
    key_rows = config.query_groups * config.head_channels
    return config.num_attention_heads * config.head_channels * (1 + config.attention_output_gate), key_rows, key_rows


def separate_qkv(ours: Tensor, config: ModelConfig) -> Sequence[Tensor]:
    """Split [(Hq + 2*Hkv)*D, ...] in groups as `interleave_qkv` makes them -> query, key and value."""
    size = config.head_channels
    queries = config.num_attention_heads // config.query_groups * size
    groups = ours.unflatten(0, (config.query_groups, -1))  # [groups, rows, ...]
    gates = [queries] if config.attention_output_gate else []
    query, *gate, key, value = (part.flatten(0, 1) for part in groups.split([queries, *gates, size, size], dim=1))
    if gate:
        query = torch.stack([part.unflatten(0, (-1, size)) for part in (query, *gate)], dim=1).flatten(0, 2)
    return query, key, value


QUERY_KEY_VALUE = Conversion(_qkv_rows, interleave_qkv, separate_qkv)
