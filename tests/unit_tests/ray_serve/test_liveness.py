"""Signs of life of a replica's parts, as its health checks see them."""

from __future__ import annotations

import itertools
import threading

import pytest

from megatron_ext.ray_serve.liveness import LOOKS, Liveness, watching

PATIENCE = 60.0  # seconds until a test gives up; nothing is measured


class Checks:
    """Health checks by a clock of their own."""

    def __init__(self) -> None:
        self.now = 0.0
        self.liveness = Liveness(30.0, lambda: self.now)

    def after(self, seconds: float, **parts: bool) -> list[str]:
        """Return the silent parts of a check that finds these parts alive or not."""
        self.now += seconds
        for name, is_alive in parts.items():
            self.liveness.look(name, is_alive=is_alive)
        return self.liveness.silent()


def test_a_silent_part_is_named():
    """RP-6: after as many seconds as are given without a sign of life; parts that give signs are not named."""
    checks = Checks()
    found = [checks.after(10, engine=True, rank=number == 0) for number in range(6)]
    assert found == [[], [], [], [], ["rank"], ["rank"]]
    assert checks.after(10, engine=True, rank=True) == []


def test_time_without_checks_does_not_count():
    """RP-6: a replica that stood still itself has seen no signs, which says nothing about its parts."""
    checks = Checks()
    checks.after(0, engine=True)
    assert checks.after(1000, engine=False) == []
    assert checks.after(1, engine=False) == []
    assert checks.after(1, engine=False) == ["engine"]


@pytest.mark.parametrize("is_lasting", [False, True])
def test_a_block_is_watched_to_its_end(is_lasting: bool):
    """RP-6: a part that falls silent during the block is named once; one that answers is not."""
    looks, silent, has_looked_often, is_over = itertools.count(), [], threading.Event(), threading.Event()

    def alive() -> dict[str, bool]:
        assert not is_over.is_set()
        if next(looks) >= 3 * LOOKS:
            has_looked_often.set()
        return {"rank 1": True, "rank 2": is_lasting}

    with watching(alive, 0.06, lambda names: silent.append(names) or has_looked_often.set()):
        assert has_looked_often.wait(PATIENCE)
    is_over.set()
    assert silent == ([] if is_lasting else [["rank 2"]])
