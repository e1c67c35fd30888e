"""megatron-core 0.18 and 0.19: a flag of the process says whether a forward is inference."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from megatron.core.inference.utils import InferenceMode
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.models.hybrid.hybrid_model import HybridModel

from megatron_ext.mcore.versions import since_v0_17
from megatron_ext.mcore.versions.since_v0_17 import *  # noqa: F403
from megatron_ext.mcore.versions.since_v0_17 import Context, Controller

Model, Stack, StackSubmodules = HybridModel, HybridStack, HybridStackSubmodules
_changing = threading.Lock()
_forwards = 0  # that run now, in all threads
_was_active = False  # before the first of them


class Engine(since_v0_17.Engine):
    """Engine that leaves the process's flag as it was: a trainer may use the model between two steps."""

    def __init__(self, controller: Controller, context: Context, random_seed: int, logging_step_interval: int) -> None:
        with inference_mode():
            super().__init__(controller, context, random_seed, logging_step_interval)


@contextlib.contextmanager
def inference_mode() -> Iterator[None]:
    """Mark forwards as inference inside this context; concurrent ones of several threads share the flag."""
    global _forwards, _was_active
    with _changing:
        if _forwards == 0:
            _was_active = InferenceMode.is_active()
        _forwards += 1
        InferenceMode.set_active()
    try:
        yield
    finally:
        with _changing:
            _forwards -= 1
            if _forwards == 0 and not _was_active:
                InferenceMode.unset_active()
