"""Table of ahead-of-time compilation results: a line for each configuration and device, over all types."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """Resources of one configuration on one device; numbers are maxima over its compiled types.

    Attributes:
        kernel: Name of the kernel.
        config: Name of the configuration.
        arch: Compute capability times ten.
        variants: Number of compiled types and alignments.
        registers: Registers of a thread.
        spilled_bytes: Spilled bytes of a thread.
        shared_bytes: Shared memory of a block of threads.
    """

    kernel: str
    config: str
    arch: int
    variants: int
    registers: int
    spilled_bytes: int
    shared_bytes: int


def rows(compiled: Iterable[Row]) -> list[Row]:
    """Merge rows that differ in types alone, in order of first occurrence."""
    found: dict[tuple[str, str, int], Row] = {}
    for one in compiled:
        key = (one.kernel, one.config, one.arch)
        other = found.get(key)
        found[key] = one if other is None else _max(one, other)
    return list(found.values())


def _max(one: Row, other: Row) -> Row:
    return Row(
        one.kernel,
        one.config,
        one.arch,
        one.variants + other.variants,
        max(one.registers, other.registers),
        max(one.spilled_bytes, other.spilled_bytes),
        max(one.shared_bytes, other.shared_bytes),
    )


def as_text(table: Sequence[Row]) -> str:
    """Format the table as columns of text, with a line of titles."""
    titles = ("kernel", "configuration", "device", "types", "registers", "spills", "shared memory")
    lines: list[tuple[str, ...]] = [titles]
    for row in table:
        numbers = (row.variants, row.registers, row.spilled_bytes, f"{row.shared_bytes:,}")
        lines.append((row.kernel, row.config, f"sm_{row.arch}", *map(str, numbers)))
    widths = [max(len(line[column]) for line in lines) for column in range(len(titles))]
    aligned = [
        [
            cell.ljust(width) if column < 3 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        for line in lines
    ]
    return "\n".join("  ".join(line).rstrip() for line in aligned)
