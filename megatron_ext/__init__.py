"""megatron_ext: prefix caching for hybrid Transformer-Mamba models on megatron-core's dynamic engine.

    from megatron_ext import RequestParams, load_engine

    with load_engine() as engine:
        for record in engine.generate(["The import statement", "A list is"], RequestParams(num_tokens_to_generate=20)):
            print(record.generated_text)

See docs/python.md. Names are imported lazily: `import megatron_ext` itself imports nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_ext.api.engine import AttachedEngine as AttachedEngine
    from megatron_ext.api.engine import EngineFollower as EngineFollower
    from megatron_ext.api.engine import LoadedEngine as LoadedEngine
    from megatron_ext.api.inference_args import add_inference_args as add_inference_args
    from megatron_ext.api.inference_args import settings_from_args as settings_from_args
    from megatron_ext.api.loading import attach_engine as attach_engine
    from megatron_ext.api.loading import follow_engine as follow_engine
    from megatron_ext.api.loading import load_engine as load_engine
    from megatron_ext.api.loading import load_follower as load_follower
    from megatron_ext.api.stream import RequestStream as RequestStream
    from megatron_ext.api.stream import StreamPart as StreamPart
    from megatron_ext.config import RequestParams as RequestParams
    from megatron_ext.engine.statistics import EngineStatistics as EngineStatistics
    from megatron_ext.errors import CheckpointError as CheckpointError
    from megatron_ext.errors import ConfigError as ConfigError
    from megatron_ext.errors import EngineClosed as EngineClosed
    from megatron_ext.errors import EngineSuspended as EngineSuspended
    from megatron_ext.errors import RankError as RankError
    from megatron_ext.errors import RequestFailed as RequestFailed
    from megatron_ext.errors import SilentWeightChange as SilentWeightChange
    from megatron_ext.errors import WeightUpdateError as WeightUpdateError
    from megatron_ext.scheduling.record import RequestRecord as RequestRecord
    from megatron_ext.scheduling.record import Status as Status

__version__ = "0.3.0"

_NAMES = {
    "api.engine": ("AttachedEngine", "EngineFollower", "LoadedEngine"),
    "api.inference_args": ("add_inference_args", "settings_from_args"),
    "api.loading": ("attach_engine", "follow_engine", "load_engine", "load_follower"),
    "api.stream": ("RequestStream", "StreamPart"),
    "config": ("RequestParams",),
    "engine.statistics": ("EngineStatistics",),
    "errors": (
        *("CheckpointError", "ConfigError", "EngineClosed", "EngineSuspended", "RankError", "RequestFailed"),
        *("SilentWeightChange", "WeightUpdateError"),
    ),
    "scheduling.record": ("RequestRecord", "Status"),
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names}
__all__ = ["__version__", *_HOMES]


if not TYPE_CHECKING:  # type checkers would accept any name

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
        globals()[name] = found
        return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
