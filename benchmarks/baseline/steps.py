"""Prefill and decode steps of this checkout beside others."""

from __future__ import annotations

import statistics

from benchmarks.baseline.turns import OWN, SHARED, Measured, checkouts
from benchmarks.cases import Figure, Run, case

WORKS = (f"cold prefill of {SHARED + OWN:,}", f"{OWN} after {SHARED:,} cached", "decode of 1", "decode of 8")


@case("baseline", quick={"sizes": ("5m",), "turns": 1})
def steps(run: Run, sizes: tuple = ("5m", "250m"), turns: int = 9, others: tuple = ("",)) -> None:
    """Medians of prefills and decode steps; checkouts take turns, and a turn before warms up."""
    for size in sizes:
        measured = {name: Measured(path, size) for name, path in checkouts(others).items()}
        times: dict[tuple[str, str], list[float]] = {(work, name): [] for work in WORKS for name in measured}
        for turn in range(turns + 1):
            for work, name in times:
                taken = measured[name].seconds(work)
                times[work, name] += taken if turn else []
        for one in measured.values():
            one.close()
        for work in WORKS:
            found = {name: 1e3 * statistics.median(times[work, name]) for name in measured}
            figures: dict[str, Figure] = {f"{name}, ms": one for name, one in found.items()}
            figures |= {f"this over {name}": found["this"] / one for name, one in found.items() if name != "this"}
            run.row(f"{size}: {work}", figures)
