"""Linear layers of CPUs: packed weights beside `F.linear`, for the table in `megatron_ext/ops/linear/table.py`.

A product reads more weights in turns than a CPU's caches hold, as the layers of a model do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from benchmarks.cases import Run, case
from benchmarks.machine import cpu_name
from benchmarks.measuring import fastest
from megatron_ext.ops.cpp import are_used
from megatron_ext.ops.linear import PackedWeight, cpp, onednn
from megatron_ext.ops.linear.table import MIB, TABLE, Row, instruction_sets, row_for

Found = Mapping[str, Mapping[tuple[int, int], Sequence[float]]]

ROWS = (1, 2, 4, 8, 16, 128, 512)
# (outputs, inputs)
SHAPES = (
    *((128, 128), (128, 256), (256, 256), (512, 512), (4096, 64), (2048, 128), (1024, 256), (1024, 1024), (288, 2048)),
    *((2048, 1024), (1024, 2048), (4384, 1024), (32000, 1024)),
)
READ_BYTES = 128 * MIB
OPERATIONS = 1e9  # of a call, and one product at least
# Times `F.linear` at every number of rows: the limit for packing a weight. Our kernels may take longer for one row of a
# small weight of 16 bits, since `F.linear` takes several times as long from two rows on.
NOT_SLOWER = {"onednn": 1.05, "cpp": 1.5}


@case("operators", quick={"repeats": 1, "shapes": ("64x64",), "rows": (1, 8)})
@torch.inference_mode()
def linear(
    run: Run,
    repeats: int = 9,
    shapes: tuple = tuple(f"{o}x{i}" for o, i in SHAPES),
    rows: tuple = ROWS,
    types: tuple = ("float32", "bfloat16", "float16"),
) -> None:
    """Packed weights over `F.linear`, by type, backend, shape and rows; and the table that follows."""
    run.remark(f"{cpu_name()}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    pairs = [tuple(map(int, one.split("x"))) for one in shapes]
    for name in types:
        dtype = getattr(torch, name)
        found = {backend: {} for backend in _backends(dtype)}
        for outputs, inputs in tqdm(pairs, unit="weight", leave=False):
            for backend, ratios in _ratios(run, dtype, outputs, inputs, rows, repeats).items():
                found[backend][outputs, inputs] = ratios
                columns = {f"{count} rows": ratio for count, ratio in zip(rows, ratios, strict=True)}
                size = dtype.itemsize * outputs * inputs / MIB
                run.row(f"{name} {backend} {outputs} x {inputs}", {"MiB": size, **columns})
        for line in advice(dtype, found):
            run.remark(line)


def _backends(dtype: torch.dtype) -> dict[str, Callable[[Tensor], PackedWeight]]:
    """Return the constructors of packed weights of a type, by the name of the backend."""
    found: dict[str, Callable[[Tensor], PackedWeight]] = {}
    if onednn.supports(torch.empty(1, 1, dtype=dtype)):
        found[onednn.NAME] = onednn.OneDnnWeight
    if dtype in cpp.DTYPES and are_used():
        found[cpp.BACKEND.name] = cpp.PanelWeight
    return found


def _ratios(
    run: Run, dtype: torch.dtype, outputs: int, inputs: int, rows: Sequence[int], repeats: int
) -> dict[str, list[float]]:
    """Return the ratios of each backend's time to the time of `F.linear`, one for each number of rows."""
    count = 1 if run.is_quick else max(1, READ_BYTES // (dtype.itemsize * outputs * inputs))
    weights = [torch.randn(outputs, inputs).to(dtype) for _ in range(count)]
    packed = {name: [pack(weight) for weight in weights] for name, pack in _backends(dtype).items()}
    found: dict[str, list[float]] = {name: [] for name in packed}
    for number in rows:
        times = fastest(_works(weights, packed, torch.randn(number, inputs).to(dtype)), repeats)
        for name in packed:
            found[name].append(times[name] / times["F.linear"])
    return found


def _works(
    weights: Sequence[Tensor], packed: Mapping[str, Sequence[PackedWeight]], x: Tensor
) -> dict[str, Callable[[], object]]:
    """Return calls that multiply with the same number of weights each, one after the other."""
    products = min(len(weights), 1 + int(OPERATIONS / (x.shape[0] * weights[0].numel())))
    works: dict[str, Callable[[], object]] = {
        "F.linear": lambda: [F.linear(x, weight) for weight in weights[:products]]
    }
    for name, ones in packed.items():
        works[name] = lambda ones=ones: [one(x) for one in ones[:products]]
    return works


def advice(dtype: torch.dtype, found: Found, rows: Sequence[Row] = TABLE) -> list[str]:
    """Return lines that say where measured ratios and the committed table agree, and where they do not.

    Args:
        dtype: Type of the weights.
        found: For each backend the ratios of `_ratios`, by (outputs, inputs).
        rows: The table.
    """
    names = " ".join(instruction_sets(dtype))
    row = row_for(dtype, tuple(rows))
    if row is None:
        lines = [f"the table has no row for {dtype} on {names}: F.linear computes"]
    else:
        lines = [f"{names}, {dtype}: {row.backend} packs weights {row.limits}; measured on {row.measured_on}"]
    for backend, ratios_of in found.items():
        for (outputs, inputs), ratios in ratios_of.items():
            packs = row is not None and row.backend == backend and row.packs(outputs, inputs)
            is_faster = max(ratios) <= NOT_SLOWER[backend]
            if packs != is_faster:
                worst = f"ratios {min(ratios):.2f} to {max(ratios):.2f}"
                lines.append(
                    f"{outputs} x {inputs}: the table says {'packed' if packs else 'not'} by {backend}, {worst}"
                )
    return lines
