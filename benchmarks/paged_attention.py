"""Attention of one layer over the block table: each backend there is, taking turns in one run.

Run: `python -m benchmarks.paged_attention` (`--threads 2`, `--heads 8 2 32`: query heads, key heads, head size). With
one thread figures are CPU time.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.measuring import header, keep_figures, part_arguments
from benchmarks.sampling import fastest
from megatron_ext.ops.paged_attention import PAGED_ATTENTION, PagedBatch, build_paged_batch, paged_attention

BLOCK = 64
STEPS = {  # (queries, keys) of each sequence
    "cold prefill of 2,176": [(2176, 2176)],
    "128 behind 2,048": [(128, 2176)],
    "128 behind 8,192": [(128, 8320)],
    "decode of 8 at 128": [(1, 128)] * 8,
    "decode of 8 at 2,048": [(1, 2048)] * 8,
    "decode of 8 at 8,192": [(1, 8192)] * 8,
}


def main() -> None:
    """Measure and print."""
    parser = part_arguments(__doc__)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--heads", type=int, nargs=3, default=(8, 2, 32))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    names = PAGED_ATTENTION.names
    table = Table("step", *(f"{name}, ms" for name in names), f"{names[0]} beside {names[-1]}")
    found = {}
    for step, sequences in STEPS.items():
        times = found[step] = measure(sequences, tuple(options.heads), 1 if options.quick else options.repeats)
        shown = [f"{1e3 * times[name]:.2f}" for name in names]
        table.add_row(step, *shown, f"{times[names[0]] / times[names[-1]]:.2f}")
    print(header(torch.device("cpu"), torch.float32))
    Console(width=120).print(table)
    keep_figures(options, found)


@torch.inference_mode()
def measure(sequences: list[tuple[int, int]], heads: tuple[int, int, int], repeats: int) -> dict[str, float]:
    """Seconds of each backend."""
    query_heads, key_heads, head_size = heads
    queries, keys = zip(*sequences, strict=True)
    counts = [-(-length // BLOCK) for length in keys]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0)).tolist()
    tables = [[order.pop() for _ in range(count)] for count in counts]
    caches = [torch.randn(sum(counts), BLOCK, key_heads, head_size) for _ in range(2)]
    decodes = sum(length == 1 for length in queries)
    batch = build_paged_batch(tables, queries, keys, decodes, BLOCK, "cpu")
    q = torch.randn(sum(queries), query_heads, head_size)
    return fastest({name: call(name, q, caches, batch) for name in PAGED_ATTENTION.names}, repeats)


def call(name: str, q: Tensor, caches: list[Tensor], batch: PagedBatch) -> Callable[[], Tensor]:
    """Compute one layer's attention by one backend."""

    def attend() -> Tensor:
        with PAGED_ATTENTION.forced(name):
            return paged_attention(q, *caches, batch, scale=q.shape[-1] ** -0.5)

    return attend


if __name__ == "__main__":
    main()
