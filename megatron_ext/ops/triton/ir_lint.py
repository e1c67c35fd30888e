"""Properties of compiled kernels, read from Triton's intermediate code: products, their precision, and their copies.

TTIR has the products as they were written, TTGIR as the device computes them. A loop *overlaps* if each of its
asynchronous copies has a product of the same loop between its issue and the wait for it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_DOT = re.compile(r"= (?:tt\.dot|ttng\.warp_group_dot) ")
_GROUP, _WAIT = "ttg.async_commit_group", re.compile(r"ttg\.async_wait .*\{num = (\d+)")
_TRIPS = 4  # of a loop, until its copies are in their steady state
_FP32_DOT = re.compile(r"= tt\.dot .*: tensor<[\dx]+xf32.*?> \* ")


@dataclass(frozen=True)
class Loop:
    """Innermost loop with products.

    Attributes:
        products: Number of products.
        copies: Number of groups of asynchronous copies.
        overlaps: True if there are asynchronous copies and each of them overlaps a product.
    """

    products: int
    copies: int
    overlaps: bool


def precisions(ttir: str) -> set[str]:
    """Return the precisions of products of two fp32 tensors: "ieee", "tf32", "tf32x3"."""
    found = set()
    for line in ttir.splitlines():
        if _FP32_DOT.search(line):
            named = re.search(r"inputPrecision = (\w+)", line)
            found.add("ieee" if named is None else named[1])
    return found


def loops(ttgir: str) -> list[Loop]:
    """Return the innermost loops that have products."""
    found, open_loops = [], list[tuple[int, list[str]]]()
    for line in ttgir.splitlines():
        indent = len(line) - len(line.lstrip())
        if "= scf.for " in line or line.lstrip().startswith("scf.for "):
            open_loops.append((indent, []))
        elif open_loops and line.strip().startswith("}") and indent <= open_loops[-1][0]:
            _, body = open_loops.pop()
            if any(_DOT.search(one) for one in body):
                found.append(_loop(body))
                for _, outer in open_loops:  # the outer loops are not innermost, so their products do not count
                    outer.clear()
        elif open_loops:
            open_loops[-1][1].append(line)
    return found


def _loop(body: list[str]) -> Loop:
    pending: list[int] = []  # products since the issue of each group of copies that was not waited for yet
    least: list[int] = []
    for _ in range(_TRIPS):
        for line in body:
            waited = _WAIT.search(line)
            if _DOT.search(line):
                pending = [one + 1 for one in pending]
            elif _GROUP in line:
                pending.append(0)
            elif waited is not None and len(pending) > int(waited[1]):
                done = len(pending) - int(waited[1])
                least, pending = least + pending[:done], pending[done:]
    copies = sum(_GROUP in line for line in body)
    return Loop(sum(_DOT.search(line) is not None for line in body), copies, copies > 0 and min(least, default=0) > 0)


def uses_warp_groups(ttgir: str) -> bool:
    """Return whether all products of 16-bit tensors are computed by warp groups (wgmma)."""
    narrow = [line for line in ttgir.splitlines() if _DOT.search(line) and re.search(r"x(bf16|f16),", line)]
    return all("warp_group_dot" in line for line in narrow)
