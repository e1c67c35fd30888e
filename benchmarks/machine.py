"""The machine that figures are of: name and instruction sets of its CPU. Standard library only."""

from __future__ import annotations

from pathlib import Path

_CPU_INFO = Path("/proc/cpuinfo")
_WIDE = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve", "bf16")  # that matrix products use


def _field(*names: str) -> str:
    for line in _CPU_INFO.read_text("utf-8").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in names:
            return value.strip()
    return ""


def cpu_name() -> str:
    """Return the name of this machine's CPU."""
    return _field("model name") or "an unknown CPU"


def instruction_sets() -> str:
    """Return the instruction sets of this machine's CPU that matrix products use, by the kernel's names."""
    found = _field("flags", "Features").split()
    return ", ".join(name for name in _WIDE if name in found) or "no vector instructions known"
