"""Linear layers of CPUs: packed weights beside `F.linear`, for the table in `megatron_ext/ops/linear/table.py`.

A product reads more weights in turns than a CPU's caches hold, as the layers of a model do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from benchmarks.cases import Run, case
from benchmarks.machine import cpu_name
from benchmarks.measuring import fastest
from megatron_ext.ops.linear import PackedWeight, onednn
from megatron_ext.ops.linear.table import MIB, TABLE, Row, instruction_set

ROWS = (1, 2, 4, 8, 16, 128, 512)
# (outputs, inputs)
SHAPES = (
    *((128, 128), (256, 256), (512, 512), (4096, 64), (2048, 128), (1024, 256), (1024, 1024), (288, 2048)),
    *((2048, 1024), (1024, 2048), (4384, 1024), (32000, 1024)),
)
READ_BYTES = 128 * MIB
OPERATIONS = 1e9  # of a call, and one product at least
NOT_SLOWER = 1.05  # times `F.linear`, at every number of rows: the limit for packing a weight


@case("operators", quick={"repeats": 1, "shapes": ("64x64",), "rows": (1, 8)})
@torch.inference_mode()
def linear(
    run: Run, repeats: int = 9, shapes: tuple = tuple(f"{o}x{i}" for o, i in SHAPES), rows: tuple = ROWS
) -> None:
    """Packed weights over `F.linear`, by weight (outputs x inputs) and rows; and the table that follows."""
    problem = onednn.problem()
    if problem is not None:
        run.remark(problem)
        return
    run.remark(f"{instruction_set()} of {cpu_name()}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    found: dict[tuple[int, int], list[float]] = {}
    pairs = [tuple(map(int, one.split("x"))) for one in shapes]
    with tqdm(total=len(pairs) * len(rows), unit="product", leave=False) as bar:
        for outputs, inputs in pairs:
            weights = [
                torch.randn(outputs, inputs)
                for _ in range(max(1, 1 if run.is_quick else READ_BYTES // (4 * outputs * inputs)))
            ]
            packed = [onednn.OneDnnWeight(weight) for weight in weights]
            ratios = []
            for count in rows:
                times = fastest(_works(weights, packed, torch.randn(count, inputs)), repeats)
                ratios.append(times["packed"] / times["F.linear"])
                bar.update()
            found[outputs, inputs] = ratios
            columns = {f"{count} rows": ratio for count, ratio in zip(rows, ratios, strict=True)}
            run.row(f"{outputs} x {inputs}", {"MiB": 4 * outputs * inputs / MIB, **columns})
    for line in advice(found):
        run.remark(line)


def _works(weights: Sequence[Tensor], packed: Sequence[PackedWeight], x: Tensor) -> dict[str, Callable[[], object]]:
    """Return calls that multiply with the same number of weights each, one after the other."""
    products = min(len(weights), 1 + int(OPERATIONS / (x.shape[0] * weights[0].numel())))
    return {
        "F.linear": lambda: [F.linear(x, weight) for weight in weights[:products]],
        "packed": lambda: [one(x) for one in packed[:products]],
    }


def advice(found: dict[tuple[int, int], list[float]], rows: Sequence[Row] = TABLE) -> list[str]:
    """Return lines that say where measured ratios and the committed table agree, and where they do not.

    Args:
        found: Times of packed weights over those of `F.linear` for each number of rows, by (outputs, inputs).
        rows: The table.
    """
    row = next((one for one in rows if one.instruction_set == instruction_set() and one.dtype is torch.float32), None)
    if row is None:
        lines = [f"the table has no row for {instruction_set()}: F.linear computes"]
    else:
        lines = [f"the table packs weights {row.limits}; measured on {row.measured_on}"]
    for (outputs, inputs), ratios in found.items():
        packs = row is not None and row.packs(outputs, inputs)
        is_faster = max(ratios) <= NOT_SLOWER
        if packs != is_faster:
            worst = f"ratios {min(ratios):.2f} to {max(ratios):.2f}"
            lines.append(f"{outputs} x {inputs}: the table says {'packed' if packs else 'F.linear'}, {worst}")
    return lines
