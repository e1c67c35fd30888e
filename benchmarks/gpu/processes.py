"""Parts as processes: a part that hangs is ended, and what it had found is there. Standard library only."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.gpu.notes import Page, read

ROOT = Path(__file__).resolve().parents[2]
GRACE = 10.0  # seconds beside its time, in which a part may end by itself
LEAST = 5.0  # seconds; with less nothing is begun
# One rank needs no network; the packages' warnings about what they lack are known.
ALONE = {"NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore"}


def run(command: Sequence[str], figures: Path, seconds: float, environment: Mapping[str, str]) -> Page:
    """Run a part to its end, or until its time is over.

    Args:
        command: Command of the process.
        figures: File that it writes to.
        seconds: Time of the process.
        environment: Variables beside this process's.

    Returns:
        What it wrote; a part that was ended, or that ended with nothing to show, has that among its failures.
    """
    if seconds < LEAST:
        return Page(found={}, left_out=["all of it"], failed=[], seconds=0.0)
    figures.unlink(missing_ok=True)
    process = subprocess.Popen(command, cwd=ROOT, env={**ALONE, **os.environ, **environment})
    try:
        code = process.wait(seconds + GRACE)
        why = None if code in (0, 1) else f"ended with exit code {code}"
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        why = f"did not end in {seconds + GRACE:.0f} s, and was ended"
    except BaseException:
        process.kill()
        raise
    page = read(figures)
    if page is None:
        page = Page(found={}, left_out=[], failed=[], seconds=0.0)
        why = why or "wrote nothing"
    if why is not None:
        page["found"]["the part"] = why
        page["failed"].append("the part")
    return page
