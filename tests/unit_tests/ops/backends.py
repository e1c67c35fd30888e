"""Which backends of an operator can be tested on this machine."""

from __future__ import annotations

from megatron_ext.mcore import platform
from megatron_ext.ops import cpp
from megatron_ext.ops.backends import Backends


def usable(backends: Backends) -> list[str]:
    """All names but the C++ one's where there is no compiler, or where models live on a GPU; nothing is built."""
    has_cpp = cpp.can_be_built() and platform.device().type == "cpu"
    return [name for name in backends.names if name != cpp.NAME or has_cpp]
