"""Models that have an engine: a second one on the same parameters would not notice what the first one was told."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from weakref import WeakSet

from torch import nn

from megatron_ext.errors import ConfigError

_MODELS: WeakSet[nn.Module] = WeakSet()
_changing = threading.Lock()


@contextlib.contextmanager
def attached(model: nn.Module) -> Iterator[None]:
    """Mark an unwrapped model as attached inside this context.

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
