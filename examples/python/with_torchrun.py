"""An engine in a program that torchrun started, beside a torch.distributed of its own.

    python -m torch.distributed.run --standalone --nproc-per-node 1 -m examples.python.with_torchrun

`load_engine` uses what is there and leaves it alone. In this version an engine runs on one rank.
"""

from __future__ import annotations

import os

import torch.distributed as dist

from megatron_ext import RequestParams, load_engine

PROMPTS = ["The import statement", "A list is", "What does a generator do?"]


def main() -> None:
    """Serve some prompts, and go on with one's own communication afterwards."""
    begun_here = not dist.is_initialized()
    if begun_here:
        dist.init_process_group("gloo")
    with load_engine(inference_dynamic_batching_buffer_size_gb=0.1) as engine:
        records = engine.generate(PROMPTS, RequestParams(num_tokens_to_generate=8))
    counts: list[int | None] = [None] * dist.get_world_size()
    dist.all_gather_object(counts, len(records))
    if dist.get_rank() == 0:
        print(f"rank {os.environ.get('RANK', 0)} of {dist.get_world_size()}: {counts} prompts answered")
    if begun_here:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
