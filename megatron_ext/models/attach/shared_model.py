"""Model of ours whose parameters are the tensors of a model of Megatron in memory, which has one engine at most."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator, Mapping
from weakref import WeakSet

import torch
from torch import Tensor, nn

from megatron_ext.config import ParallelConfig
from megatron_ext.errors import ConfigError
from megatron_ext.mcore import platform
from megatron_ext.mcore.weight_changes import WeightSamples, keep_samples, saved_tensors
from megatron_ext.models.attach.config import config_of, rotary_frequencies
from megatron_ext.models.attach.modules import check_modules, is_gpt, unwrapped
from megatron_ext.models.build import build_without_parameters
from megatron_ext.models.load import LoadedModel
from megatron_ext.models.megatron.stored_keys import given_name, is_used
from megatron_ext.text.library_tokenizers import adapted

_MODELS: WeakSet[nn.Module] = WeakSet()
_changing = threading.Lock()


@contextlib.contextmanager
def attached(model: nn.Module) -> Iterator[None]:
    """Mark an unwrapped model as attached inside this context.

    A second engine on the same parameters would not notice the weights that the first one was given.

    Raises:
        ConfigError: It is attached already.
    """
    with _changing:
        if model in _MODELS:
            raise ConfigError("an engine is attached to this model already; close it, or use it")
        _MODELS.add(model)
    try:
        yield
    finally:
        with _changing:
            _MODELS.discard(model)


_STAGES = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_ANY_DTYPE = ("A_log", "D", "dt_bias", "expert_bias")  # which our forward converts to fp32, whatever they are stored in


def share_model(model: object, parallel: ParallelConfig, tokenizer: object = None) -> LoadedModel:
    """Return a model of ours with the parameters of a model of Megatron, which is not changed.

    Nothing is allocated for parameters.

    Args:
        model: `GPTModel`, `MambaModel` or `HybridModel`, bare or wrapped; see `unwrapped`.
        parallel: Sizes of the process groups that the model was built in.
        tokenizer: One of this package or of megatron-core; None for token ids.

    Raises:
        ConfigError: The model has a part that cannot be run exactly; the message names it. Or the tokenizer does not
            fit it.
    """
    source = unwrapped(model)
    check_modules(source)
    config = config_of(source)
    frequencies = rotary_frequencies(source, config)
    tensors = _tensors(source)
    dtype = _dtype(tensors)
    ours = build_without_parameters(config, dtype, _with_stages(parallel, source))
    if frequencies is not None:
        ours.rotary_pos_emb.inv_freq = frequencies  # rounded as on the device that computed them
    names = _matched(ours, tensors, in_gpt=is_gpt(source))
    for name, theirs in names.items():
        _check(name, theirs, ours, source, dtype)
    for name, theirs in names.items():
        _replace(ours, name, tensors[theirs])
    _fill_counters(ours)
    keep_samples(ours, WeightSamples({theirs: tensors[theirs] for theirs in names.values()}, source))
    assert config.vocab_size is not None, "the model has an embedding"
    name = f"attached {type(source).__name__}"
    adapter = adapted(tokenizer, config.vocab_size)
    return LoadedModel(ours.eval(), config, adapter, dtype, name, packs_weights=False)


def _with_stages(parallel: ParallelConfig, source: nn.Module) -> ParallelConfig:
    """Return the sizes with the model's own numbers of layers in its first and last stage, in layers of ours."""
    per_layer = 2 if is_gpt(source) else 1
    counts = {name: getattr(source.config, name) for name in _STAGES}
    return dataclasses.replace(parallel, **{name: n * per_layer for name, n in counts.items() if n is not None})


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and stored buffers by name, a shared one under each name; without what inference ignores."""
    found: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False)) | saved_tensors(model)
    return {name: tensor for name, tensor in found.items() if is_used(name, has_prediction=True)}


def _dtype(tensors: Mapping[str, Tensor]) -> torch.dtype:
    """Return the dtype of the first matrix."""
    name, matrix = next((name, tensor) for name, tensor in tensors.items() if tensor.dim() > 1)
    if matrix.dtype not in _DTYPES:
        raise ConfigError(f"{name} of the model is of {matrix.dtype}; supported are {', '.join(map(str, _DTYPES))}")
    return matrix.dtype


def _matched(ours: nn.Module, theirs: Mapping[str, Tensor], *, in_gpt: bool) -> dict[str, str]:
    """Return their name of each of our tensors.

    Raises:
        ConfigError: A tensor is on one side only.
    """
    names = {}
    for name in _tensors(ours):
        names[name] = found = given_name(name, theirs, in_gpt)
        if found not in theirs:
            raise ConfigError(f"the model has no {found}, which its configuration asks for; it cannot be attached")
    unused = sorted(set(theirs) - set(names.values()))
    if unused:
        raise ConfigError(f"{unused[0]} of the model has no place in the engine's layers; it cannot be attached")
    return names


def _check(name: str, theirs: str, ours: nn.Module, source: nn.Module, dtype: torch.dtype) -> None:
    """Check that a tensor, and the module that it is of, can stand for ours."""
    (module, leaf), (their_module, their_leaf) = _owner(ours, name), _owner(source, theirs)
    wanted, found = getattr(module, leaf), getattr(their_module, their_leaf)
    if found.shape != wanted.shape:
        raise ConfigError(
            f"{theirs} of the model has shape {list(found.shape)}; its configuration asks for {list(wanted.shape)}"
        )
    if found.dtype != wanted.dtype and not name.endswith(_ANY_DTYPE):
        raise ConfigError(f"{theirs} of the model is of {found.dtype}, and its other tensors are of {dtype}")
    device = platform.device()
    if found.device != device:
        raise ConfigError(f"{theirs} of the model is on {found.device}; move the model to {device}")
    if not found.is_contiguous():
        raise ConfigError(f"{theirs} of the model is not contiguous; call contiguous() on it")
    epsilons = [getattr(one, "eps", None) for one in (module, their_module)]
    if None not in epsilons and epsilons[0] != epsilons[1]:
        raise ConfigError(
            f"{theirs} of the model belongs to a norm with eps = {epsilons[1]}; its configuration says {epsilons[0]}"
        )


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the module that has a tensor, and the tensor's name in it."""
    path, _, leaf = name.rpartition(".")
    return model.get_submodule(path), leaf


def _replace(model: nn.Module, name: str, tensor: Tensor) -> None:
    """Put a tensor itself into a model, so that it follows even if its storage is replaced."""
    module, leaf = _owner(model, name)
    if isinstance(tensor, nn.Parameter):
        module.register_parameter(leaf, tensor)
    else:
        module.register_buffer(leaf, tensor)


def _fill_counters(model: nn.Module) -> None:
    """Replace buffers that have no memory yet by zeros: counters of training, which inference does not read."""
    shared = saved_tensors(model)
    for name, buffer in list(model.named_buffers()):
        if buffer.is_meta:
            assert name not in shared, f"{name} is shared"
            module, leaf = _owner(model, name)
            zeros = torch.zeros(buffer.shape, dtype=buffer.dtype, device=platform.device())
            module.register_buffer(leaf, zeros, persistent=False)
