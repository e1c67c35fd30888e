"""The megatron-core that is found, behind one interface that every module of a version here has.

The version decides at the first import, as early as the import of any module of `megatron_ext.mcore`. Two versions are
tested; others, newer ones too, run after a check of every private name that is used, with a warning.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from types import ModuleType
from typing import TYPE_CHECKING, Final

from megatron_ext.errors import ConfigError
from megatron_ext.mcore.upstream_names import missing_names
from megatron_ext.mcore.upstream_version import NEWEST, TESTED, Version, check_supported, found_version

if TYPE_CHECKING:
    from megatron.core.inference.model_inference_wrappers.abstract_model_inference_wrapper import (
        AbstractModelInferenceWrapper,
    )

logger = logging.getLogger(__name__)

MODULES: Final = {(0, 16): "v0_16", (0, 17): "v0_17", (0, 18): "v0_19"}
"""Module of each series of versions, and of those up to the next one."""


def check_names(version: Version) -> None:
    """Check that an untested version has every private name that is used, and warn, on the first rank.

    Raises:
        ConfigError: It lacks some.
    """
    missing = missing_names(version)
    if missing:
        raise ConfigError(
            f"megatron-core {version} lacks what this package uses of it: {', '.join(missing)}; "
            f"install megatron-core=={NEWEST}"
        )
    if os.environ.get("RANK", "0") == "0":
        logger.warning(
            "megatron-core %s is not tested with this package; the newest tested version is %s", version, NEWEST
        )


def module_for(version: Version) -> str:
    """Return the name of the module for a version, which may be newer than every one that is known."""
    return f"{__name__}.{MODULES[max(series for series in MODULES if series <= version[:2])]}"


def _load(version: Version) -> ModuleType:
    check_supported(version)
    if version not in TESTED:
        check_names(version)
    return importlib.import_module(module_for(version))


VERSION: Final = found_version()
ADAPTER: Final = _load(VERSION)

# The interface. Classes are upstream's, or subclasses with the arguments below on every version.

BlockAllocator = ADAPTER.BlockAllocator
"""Class of the context's `block_allocator`."""
Context = ADAPTER.Context
"""`DynamicInferenceContext`, initialized with keywords of `InferenceConfig` and without tensors."""
Controller = ADAPTER.Controller
"""`TextGenerationController(wrapper, tokenizer)`."""
Engine = ADAPTER.Engine
"""`DynamicInferenceEngine(controller, context, random_seed, logging_step_interval)` with `reset_loop_state`."""
Model = ADAPTER.Model
"""The hybrid model: `MambaModel` or `HybridModel`."""
Stack = ADAPTER.Stack
"""The stack of its layers."""
StackSubmodules = ADAPTER.StackSubmodules
"""Specs of a stack's layers."""
builder: Callable[..., object] = ADAPTER.builder
"""Return what upstream's MoE layers build a part from: (class, submodules, **arguments)."""
inference_mode: Callable[[], AbstractContextManager[None]] = ADAPTER.inference_mode
"""Return a context in which a model's forward is inference."""
pattern_arguments: Callable[..., Mapping[str, object]] = ADAPTER.pattern_arguments
"""Return the arguments of `Model` that give its layers: (pattern, config, is_validated=)."""
wrap: Callable[..., AbstractModelInferenceWrapper] = ADAPTER.wrap
"""Return the inference wrapper of a model: (model in eval mode, context, padded_vocab_size)."""
