"""Private names of megatron-core and torch that this package calls, overrides or sets, by their location.

A test resolves each name against the installed version, and finds every private name in our code that is neither ours
nor listed. An untested version of megatron-core is checked when it is loaded. Start here when upgrading.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Mapping
from types import ModuleType

_INFERENCE = "megatron.core.inference"
_ENGINE = f"{_INFERENCE}.engines.dynamic_engine.DynamicInferenceEngine"

UPSTREAM_NAMES: Mapping[str, tuple[str, ...]] = {
    _ENGINE: (
        "_cond",
        "_loop",
        "_notify_cond_for_new_request",
    ),
    f"{_INFERENCE}.text_generation_controllers.text_generation_controller.TextGenerationController": (
        "_get_stop_word_finished_ids_callback",
        "_init_dynamic_sampling_tensors",
    ),
    "megatron.core.transformer.attention.Attention": (
        "_apply_output_gate",
        "_get_pp_layer_offset_for_inference",
    ),
    "megatron.core.transformer.moe.token_dispatcher.MoEAlltoAllTokenDispatcher": ("_maybe_dtoh_and_synchronize",),
    "megatron.core.transformer.moe.router.TopKRouter": ("_apply_expert_bias",),
    "megatron.core.dist_checkpointing.strategies.torch": ("_replace_state_dict_keys_with_sharded_keys",),
    "torch.distributed.distributed_c10d.ProcessGroupGloo": ("_Options",),
    "torch.nn.Module": (
        "_forward_hooks",
        "_forward_pre_hooks",
        "_non_persistent_buffers_set",
    ),
    "torch.distributed.distributed_c10d.ProcessGroupGloo._Options": ("_devices", "_threads", "_timeout"),
}
# (0, 17) and newer have these, too.
NAMES_SINCE_0_17: Mapping[str, tuple[str, ...]] = {
    _ENGINE: ("_STATE_EVENTS", "_pending_signals", "_state_events"),
}


def names_of(version: tuple[int, ...]) -> list[tuple[str, str]]:
    """Return location and name of each private name that is used of a version of megatron-core."""
    tables = [UPSTREAM_NAMES, *([NAMES_SINCE_0_17] if version >= (0, 17) else [])]
    return [(where, name) for table in tables for where, names in table.items() for name in names]


def missing_names(version: tuple[int, ...]) -> list[str]:
    """Return the full names that the installed megatron-core, of this version, does not have."""
    return [f"{where}.{name}" for where, name in names_of(version) if not is_there(where, name)]


def is_there(where: str, name: str) -> bool:
    """Return whether a module or class has a name; instances count, by the source of upstream's classes."""
    try:
        owner = _resolve(where)
    except (AttributeError, ImportError):
        return False
    if hasattr(owner, name) or isinstance(owner, ModuleType):
        return hasattr(owner, name)
    bases = inspect.getmro(owner)
    if any(name in vars(base).get("__annotations__", ()) for base in bases):
        return True
    sources = [inspect.getsource(base) for base in bases if base.__module__.startswith("megatron.")]
    return any(re.search(rf"\bself\.{name}\b", source) for source in sources)


def _resolve(path: str) -> ModuleType | type:
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        module, _, name = path.rpartition(".")
        found: type = getattr(_resolve(module), name)
        return found
