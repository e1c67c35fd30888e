"""Figures of kernel launches at the sizes of real models, and their limits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from megatron_ext.ops.triton.kernel_registry import all_kernels
from tools.kernel_checks.layer_calls import Calls
from tools.kernel_checks.sizes import LONGEST, Model, Step
from tools.kernel_checks.virtual_launch import AddressError, MadeBytes, Recorded, measure, recording

LEAST_USEFUL = 0.5
"""Share of programs that have work."""
FEW_PROGRAMS = 1024
"""Grids up to this size are not judged by their share of useful programs: empty ones cost nothing beside a launch."""
MOST_TRIPS = 256
"""Trips of a program's longest loop, for kernels and steps that have no own limit."""
TOKENS_OF_A_TRIP = 16
"""Tokens that a recurrence advances by in one trip, at least: it must pass through all tokens of a prefill."""
FULL_DEVICE = 192
"""Tiles of a prefill's attention that fill a device: what they do together takes the time, not the longest loop."""
TRIPS_OF_A_DECODE = 1024
"""Trips of `paged_decode_split`: with many rows their programs fill the device, and few of them share a row's keys."""
MOST_BYTES, MOST_BYTES_OF_A_TOKEN = 256 << 20, 128 << 10
"""Bytes that the operators of a part of a layer may allocate for results and in between: in all, or for each token."""


@dataclass(frozen=True)
class Row:
    """Figures of one launch at one model and step.

    Attributes:
        kernel: Name of the kernel.
        model: Name of the model.
        step: Name of the step.
        programs: Size of the grid.
        useful: Share of programs that store something.
        trips: Trips of a program's longest loop.
        operator_bytes: Bytes that the operators of its part of a layer allocate.
        problems: Limits that are broken, by name of the check.
    """

    kernel: str
    model: str
    step: str
    programs: int
    useful: float
    trips: int
    operator_bytes: int
    problems: tuple[str, ...]


def most_trips(launch: Recorded, model: Model, step: Step) -> float:
    """Return the limit of a program's longest loop: attention's depends on the number of cached keys if it must."""
    kernel = launch.kernel
    if kernel.name == "paged_prefill" and launch.programs >= FULL_DEVICE and launch.grid[2] == 1:
        return math.inf
    if kernel.name == "paged_decode_split":
        return TRIPS_OF_A_DECODE
    is_recurrence = kernel.name.startswith(("ssd_prefill", "state_passing", "delta_prefill", "selective_prefill"))
    return max(MOST_TRIPS, step.tokens // TOKENS_OF_A_TRIP if is_recurrence else 0)


def measure_step(model: Model, step: Step) -> list[Row]:
    """Measure a step's launches in a process of its own: all at the longest context, else only attention's."""
    all_kernels()
    if step.prefills > 1:
        return list(rows_of_many(model, step))
    return list(rows_of(model, step, () if step.context == LONGEST else ("attention",)))


def rows_of_many(model: Model, step: Step) -> Iterator[Row]:
    """Yield the figures of a recurrence of several prefills; no program may loop longer than for one of them."""
    alone = {row.kernel: row.trips for row in rows_of(model, replace(step, prefills=1), ("recurrence",))}
    for row in rows_of(model, step, ("recurrence",)):
        yield replace(row, problems=(*row.problems, *["others"] * (row.trips > alone[row.kernel])))


def rows_of(model: Model, step: Step, only: Sequence[str] = ()) -> Iterator[Row]:
    """Yield the figures of a model's launches in a step; `only` names operators of `Calls`."""
    for name, call in Calls(model, step).all():
        if only and name not in only:
            continue
        with MadeBytes() as made, recording() as launches:
            call()
        for launch in launches:
            yield row_of(launch, model, step, made.total)


def row_of(launch: Recorded, model: Model, step: Step, operator_bytes: int) -> Row:
    """Measure a launch and compare it with the limits."""
    try:
        found = measure(launch)
    except AddressError as error:
        return Row(launch.kernel.name, model.name, step.name, launch.programs, 0.0, 0, 0, (f"address: {error}",))
    problems = []
    if found.useful < LEAST_USEFUL and found.programs > FEW_PROGRAMS:
        problems.append("useful")
    if found.trips > most_trips(launch, model, step):
        problems.append("depth")
    if operator_bytes > max(MOST_BYTES, step.rows * MOST_BYTES_OF_A_TOKEN):
        problems.append("bytes")
    problems += [f"{name} beyond int32" for name in launch.wide]
    problems += [f"{name} misaligned" for name in launch.misaligned]
    figures = (found.programs, found.useful, found.trips, operator_bytes)
    return Row(launch.kernel.name, model.name, step.name, *figures, tuple(problems))
