"""Stored keys: the mapping from a model's keys to keys of a distributed checkpoint.

A model of ours requests the keys of Megatron's hybrid models made from Transformer Engine specs. Other checkpoints
store the same tensors under other keys:

- Local specs: a norm is a separate module, `decoder.layers.3.norm.weight` instead of
  `decoder.layers.3.mixer.in_proj.layer_norm_weight`. A model built from such a spec needs the reverse mapping.
- GPT: a layer is an attention and an MLP or experts, so layer n is our layers 2n and 2n + 1. The final norm has another
  name. Often all layers are in one tensor [layers, ...], or [layers, experts, ...], whose key has no number:
  `decoder.layers.mlp.linear_fc2.weight`. A gated delta net in the place of attention is called attention, too.
- Multi-token prediction of a GPT: both of our layers of a depth are one, `mtp.layers.0.transformer_layer`.

Only the description of the request changes; no tensor is copied.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

from megatron_ext.mcore.checkpoint.checkpoint_files import COMMON_OBJECT
from megatron_ext.models.weight_files import is_prediction

Sharded: TypeAlias = ShardedTensor | ShardedTensorFactory

_LAYER = re.compile(r"(decoder|mtp\.layers\.\d+\.mtp_model_layer)\.layers\.(\d+)\.(.+)")
# Prefixes of a separate norm, and of the same norm fused into the linear layer after it.
_NORMS = (
    ("norm.", "mixer.in_proj.layer_norm_"),
    ("input_layernorm.", "self_attention.linear_qkv.layer_norm_"),
    ("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"),
)
# Prefixes of a recurrent layer's parts, and of the same parts in a layer of GPT.
_GPT_NAMES = (("mixer.", "self_attention."), ("norm.", "input_layernorm."))
_HYBRID_FINAL_NORM, _GPT_FINAL_NORM = "decoder.final_norm.", "decoder.final_layernorm."
# Training state in a checkpoint: the optimizer's tensors, and objects of these names. The common state is read apart.
_OPTIMIZER = re.compile(r"(chained_\d+\.)?optimizer\.")
_TRAINING_OBJECTS = frozenset(("rng_state", "rerun_state_machine_state", COMMON_OBJECT))
_OUR_PREDICTION, _GPT_PREDICTION = ".mtp_model_layer", ".transformer_layer"
_EXTRA_STATE = "_extra_state"  # Transformer Engine's scales of 8-bit training; a norm's follow its key's prefix
_EXPERT = re.compile(r"(.+\.experts\.)local_experts\.(\d+)\.(linear_fc[12]\.(?:weight|bias))")


def is_gpt(stored: Iterable[str]) -> bool:
    """Return whether keys are a GPT model's."""
    return any(key.startswith(_GPT_FINAL_NORM) for key in stored)


def final_norm_in_gpt(names: Iterable[str]) -> bool | None:
    """Return whether a final norm among the names is a GPT model's; None without a final norm."""
    for name in names:
        if name.startswith((_HYBRID_FINAL_NORM, _GPT_FINAL_NORM)):
            return name.startswith(_GPT_FINAL_NORM)
    return None


def is_used(key: str, has_prediction: bool) -> bool:
    """Return whether a model uses a stored tensor or object; training state and scales are ignored."""
    name = key.split("/shard_")[0]
    is_ignored = _OPTIMIZER.match(name) or name in _TRAINING_OBJECTS or name.endswith(_EXTRA_STATE)
    return not is_ignored and (has_prediction or not is_prediction(key))


def as_stored(sharded: Sharded, stored: Container[str], gpt_layers: int | None) -> Sharded:
    """Return a requested parameter under the keys that a checkpoint has; under the first possible ones if it has none.

    Args:
        stored: Keys of the checkpoint's tensors.
        gpt_layers: Layers of a GPT checkpoint; None for a hybrid one.
    """
    options = [_at(sharded, place, gpt_layers) for place in candidate_keys(sharded.key, gpt_layers is not None)]
    found = (option for option in options if all(shard.key in stored for shard in shards(option)))
    return next(found, options[0])


def shards(sharded: Sharded) -> list[ShardedTensor]:
    """Return the global tensors that one parameter is read from."""
    return [sharded] if isinstance(sharded, ShardedTensor) else list(nested_values({"": sharded.build()}))


@dataclass(frozen=True)
class StoredKey:
    """Key, and the row in a stack of layers if the key is a stack's."""

    key: str
    row: int | None = None


def candidate_keys(key: str, in_gpt: bool) -> Iterator[StoredKey]:
    """Yield the possible locations of a parameter of ours, the likeliest first.

    Args:
        key: Key in a model of ours.
        in_gpt: Whether the checkpoint is a GPT model's.
    """
    for name in (key, _other_norm(key)):
        if name is not None:
            yield from _gpt_keys(name) if in_gpt else (StoredKey(name),)


def given_name(name: str, given: Container[str], in_gpt: bool) -> str:
    """Return the given name of a tensor of ours in a model of Megatron; the likeliest one if none is given.

    Since 0.19 a mixer has the convolution's parameters itself; Transformer Engine has all experts in one module.

    Args:
        name: Name in our model on this rank.
        given: Names in the model of Megatron.
        in_gpt: Whether that model is a GPT.
    """
    options = []
    for key in (place.key for place in candidate_keys(name, in_gpt) if place.row is None):
        expert = _EXPERT.fullmatch(key)
        in_memory = f"{expert[1]}{expert[3]}{expert[2]}" if expert is not None else key.replace(".conv1d.", ".conv1d_")
        options += [key, in_memory]
    return next((one for one in options if one in given), options[0])


def _other_norm(key: str) -> str | None:
    """Return a norm's key in the other form, fused or separate; None if the key is not a layer norm's."""
    layer = _LAYER.fullmatch(key)
    if layer is None:
        return None
    stack, number, rest = layer.groups()
    for alone, fused in _NORMS:
        for one, other in ((alone, fused), (fused, alone)):
            if rest.startswith(one):
                return f"{stack}.layers.{number}.{other}{rest.removeprefix(one)}"
    return None


def _gpt_keys(key: str) -> Iterator[StoredKey]:
    layer = _LAYER.fullmatch(key)
    if layer is None:
        yield StoredKey(key.replace(_HYBRID_FINAL_NORM, _GPT_FINAL_NORM))
        return
    stack, number, rest = layer[1], int(layer[2]) // 2, layer[3]
    for ours, theirs in _GPT_NAMES:
        if rest.startswith(ours):
            rest = theirs + rest.removeprefix(ours)
    if is_prediction(stack):
        yield StoredKey(f"{stack.removesuffix(_OUR_PREDICTION)}{_GPT_PREDICTION}.{rest}")
        return
    yield StoredKey(f"{stack}.layers.{number}.{rest}")
    yield StoredKey(f"{stack}.layers.{rest}", row=number)


def _at(sharded: Sharded, place: StoredKey, layers: int | None) -> Sharded:
    """Return the parameter, requested at another location."""

    def moved(shard: ShardedTensor) -> ShardedTensor:
        if place.row is None:
            return shard
        assert layers is not None, "only a GPT checkpoint stacks its layers"
        return _row_of_stack(shard, place.row, layers)

    if isinstance(sharded, ShardedTensor):
        return moved(dataclasses.replace(sharded, key=place.key))

    def build(*args: object) -> object:
        return dict_list_map_outplace(moved, sharded.build_fn(*args))

    return dataclasses.replace(sharded, key=place.key, build_fn=build)


def _row_of_stack(shard: ShardedTensor, row: int, rows: int) -> ShardedTensor:
    """Return one layer's tensor as a row of all layers' tensor, of which it is one fragment.

    An expert's tensor is a row of all experts' tensor already; in a stack the layers come before the experts.
    """
    return dataclasses.replace(
        shard,
        prepend_axis_num=shard.prepend_axis_num + 1,
        global_shape=(rows, *shard.global_shape),
        global_offset=(row, *shard.global_offset),
        axis_fragmentations=(rows, *shard.axis_fragmentations),
    )
