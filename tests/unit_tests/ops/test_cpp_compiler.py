"""SC-10: the compiler's process ends with the build that started it."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from megatron_ext.ops.cpp.library_build import compile_library


def is_gone(pid: int) -> bool:
    """Ended, though perhaps not waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_an_interrupt_ends_the_compiler(tmp_path, monkeypatch):
    """Interrupted while it runs: it and what it has started are ended."""
    script, started = tmp_path / "slow", tmp_path / "started"
    script.write_text(f"#!/bin/sh\nsleep 600 &\necho $! $$ > {started}.part\nmv {started}.part {started}\nwait\n")
    script.chmod(0o755)

    def interrupted(*_: object, **__: object) -> None:
        while not started.exists():
            time.sleep(0.01)
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "communicate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        compile_library([str(script)], [tmp_path / "x.cpp"], tmp_path)
    pids = [int(pid) for pid in started.read_text().split()]
    while not all(is_gone(pid) for pid in pids):  # for ever, if they were not ended
        time.sleep(0.01)
