"""Processes of several checkouts, each of which measures one work at a time, so that checkouts take turns.

`python -m benchmarks.baseline.turns SIZE` is such a process: it reads the name of a work from each line of its standard
input, and answers with a line of JSON, the seconds of each call.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeAlias

Work: TypeAlias = "Callable[[], list[float]]"
ROOT = Path(__file__).resolve().parents[2]
SHARED, OWN, STEPS, TURNS = 2_048, 128, 16, 64  # tokens; steps of a turn; turns that a decoding engine has steps for


def checkouts(others: tuple[str, ...]) -> dict[str, Path]:
    """Return this checkout and the others, by name."""
    return {"this": ROOT, **{one: Path(one).resolve() for one in others if one}}


class Measured:
    """Process of one checkout.

    Args:
        checkout: Its folder.
        size: Key in `benchmarks.peers.sizes.SIZES`.
    """

    def __init__(self, checkout: Path, size: str) -> None:
        command = [sys.executable, "-m", "benchmarks.baseline.turns", size]
        self._process = subprocess.Popen(
            command, cwd=checkout, env=_environment(checkout), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def seconds(self, work: str) -> list[float]:
        """Do one turn of a work; return the seconds of each call."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{work}\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("["):  # other lines are remarks of libraries
                found: list[float] = json.loads(line)
                return found
        raise RuntimeError(f"{self._process.args} ended with exit code {self._process.wait()}")

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def _environment(checkout: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(checkout)}


def works(size: str) -> Mapping[str, Work]:
    """Build a model of this size; return its works by name. Processes that only start others do without torch."""
    from benchmarks.latency.prefixes import ON, ONE, after, fresh, roomy
    from benchmarks.latency.steps import decoding
    from benchmarks.measuring import timed
    from benchmarks.models import nemotron_h, pair
    from benchmarks.peers.sizes import SIZES

    loaded = pair(lambda: nemotron_h(SIZES[size].shape)).ours
    engine, prefix = roomy(loaded, ON), fresh(SHARED)
    engine.generate(after(prefix, 1), ONE)
    decoders = {count: decoding(loaded, count, OWN, STEPS * TURNS) for count in (1, 8)}

    def cold() -> list[float]:
        return [timed(lambda: engine.generate(after(fresh(SHARED), 1), ONE))]

    def warm() -> list[float]:
        return [timed(lambda: engine.generate(after(prefix, 1), ONE))]

    def decode(count: int) -> list[float]:
        return [timed(decoders[count].step) for _ in range(STEPS)]

    return {
        f"cold prefill of {SHARED + OWN:,}": cold,
        f"{OWN} after {SHARED:,} cached": warm,
        "decode of 1": lambda: decode(1),
        "decode of 8": lambda: decode(8),
    }


def answers(known: Mapping[str, Work], lines: Iterator[str]) -> Iterator[str]:
    """Yield a line of JSON for each named work."""
    for line in lines:
        yield json.dumps(known[line.strip()]())


if __name__ == "__main__":
    for answer in answers(works(sys.argv[1]), sys.stdin):
        print(answer, flush=True)
