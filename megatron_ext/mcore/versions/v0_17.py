"""megatron-core 0.17: hybrid models still have the name of Mamba."""

from __future__ import annotations

import contextlib

from megatron.core.models.mamba import MambaModel
from megatron.core.ssm.mamba_block import MambaStack, MambaStackSubmodules

from megatron_ext.mcore.versions.since_v0_17 import *  # noqa: F403
from megatron_ext.mcore.versions.since_v0_17 import Engine as Engine

Model, Stack, StackSubmodules = MambaModel, MambaStack, MambaStackSubmodules


def inference_mode() -> contextlib.AbstractContextManager[None]:
    """Return a context without effect: a forward with an inference context is inference."""
    return contextlib.nullcontext()
