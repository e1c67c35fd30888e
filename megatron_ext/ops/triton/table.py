"""What was compiled ahead of time, as a table: a line for each configuration and device, of all its types."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """Of one configuration on one device; numbers are the most of all types that it was compiled for.

    Attributes:
        kernel: Name.
        config: Name.
        arch: Compute capability times ten.
        variants: Types and alignments that it was compiled for.
        registers: Of a thread.
        spilled_bytes: Of a thread.
        shared_bytes: Of a block of threads.
    """

    kernel: str
    config: str
    arch: int
    variants: int
    registers: int
    spilled_bytes: int
    shared_bytes: int


def rows(compiled: Iterable[Row]) -> list[Row]:
    """One row for all that differs in types alone, in the order in which they first came."""
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
    """Columns of text, with a line of titles."""
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
