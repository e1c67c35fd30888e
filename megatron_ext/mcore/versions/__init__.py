"""The megatron-core that is found, behind one interface that every module of a version here has.

The version decides at the first import, as early as the import of any module of `megatron_ext.mcore`. Two versions are
tested; others run after a check of every private name that is used, with a warning.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final, NamedTuple

from megatron_ext.errors import ConfigError
from megatron_ext.mcore.upstream_names import missing_names

logger = logging.getLogger(__name__)


class Version(NamedTuple):
    """Version of megatron-core, without what follows its three numbers."""

    major: int
    minor: int
    patch: int

    def __str__(self) -> str:
        return ".".join(map(str, self))


TESTED: Final = (Version(0, 16, 1), Version(0, 19, 2))
_UNTESTED_SERIES: Final = ((0, 17), (0, 18))
_UNTESTED: Final = (Version(0, 19, 0),)
_SUPPORTED: Final = "0.16.1 and 0.19.2 are tested, 0.17.x, 0.18.x and 0.19.0 run with a warning"
_MODULES: Final = {(0, 16): "v0_16", (0, 17): "v0_17", (0, 18): "v0_19", (0, 19): "v0_19"}
_PARTS = ("MAJOR", "MINOR", "PATCH")
_NUMBER = re.compile(rf"^({'|'.join(_PARTS)}) = (\d+)$", re.MULTILINE)


def found_version() -> Version:
    """Return the version of the megatron-core that Python finds, without importing it.

    Raises:
        ModuleNotFoundError: There is none.
        ConfigError: It does not say its version.
    """
    spec = importlib.util.find_spec("megatron.core")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("No module named 'megatron.core'", name="megatron.core")
    path = Path(spec.origin).with_name("package_info.py")
    numbers = dict(_NUMBER.findall(path.read_text("utf-8"))) if path.exists() else {}
    if not numbers.keys() >= set(_PARTS):
        raise ConfigError(f"megatron-core in {path.parent} does not say its version; {_SUPPORTED}")
    return Version(*(int(numbers[part]) for part in _PARTS))


def module_for(version: Version) -> str:
    """Return the name of the module for a version.

    Raises:
        ConfigError: The version is not supported.
    """
    if version in TESTED or version in _UNTESTED or version[:2] in _UNTESTED_SERIES:
        return f"{__name__}.{_MODULES[version[:2]]}"
    raise ConfigError(f"megatron-core {version} is not supported: {_SUPPORTED}; install megatron-core==0.19.2")


def check_names(version: Version) -> None:
    """Check that an untested version has every private name that is used, and warn, on the first rank.

    Raises:
        ConfigError: It lacks some.
    """
    missing = missing_names(version)
    if missing:
        raise ConfigError(
            f"megatron-core {version} lacks what this package uses of it: {', '.join(missing)}; "
            "install megatron-core==0.19.2"
        )
    if os.environ.get("RANK", "0") == "0":
        logger.warning("megatron-core %s is not tested with this package; %s", version, _SUPPORTED)


def _load() -> Any:
    name = module_for(VERSION)
    if VERSION not in TESTED:
        check_names(VERSION)
    return importlib.import_module(name)


VERSION: Final = found_version()
ADAPTER: Final = _load()

# The interface. Classes are upstream's, or subclasses with the arguments below on every version.

BlockAllocator: Any = ADAPTER.BlockAllocator
"""Class of the context's `block_allocator`."""
Context: Any = ADAPTER.Context
"""`DynamicInferenceContext`, initialized with keywords of `InferenceConfig` and without tensors."""
Controller: Any = ADAPTER.Controller
"""`TextGenerationController(wrapper, tokenizer)`."""
Engine: Any = ADAPTER.Engine
"""`DynamicInferenceEngine(controller, context, random_seed, logging_step_interval)` with `reset_loop_state`."""
Model: Any = ADAPTER.Model
"""The hybrid model: `MambaModel` or `HybridModel`."""
Stack: Any = ADAPTER.Stack
"""The stack of its layers."""
StackSubmodules: Any = ADAPTER.StackSubmodules
"""Specs of a stack's layers."""
builder: Callable[..., Any] = ADAPTER.builder
"""Return what upstream's MoE layers build a part from: (class, submodules, **arguments)."""
inference_mode: Callable[[], AbstractContextManager[None]] = ADAPTER.inference_mode
"""Return a context in which a model's forward is inference."""
pattern_arguments: Callable[..., Mapping[str, Any]] = ADAPTER.pattern_arguments
"""Return the arguments of `Model` that give its layers: (pattern, config, is_validated=)."""
wrap: Callable[..., Any] = ADAPTER.wrap
"""Return the inference wrapper of a model: (model in eval mode, context, padded_vocab_size)."""
INTERFACE: Final = (
    "BlockAllocator",
    "Context",
    "Controller",
    "Engine",
    "Model",
    "Stack",
    "StackSubmodules",
    "builder",
    "inference_mode",
    "pattern_arguments",
    "wrap",
)
