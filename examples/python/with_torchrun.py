"""An engine on the ranks that torchrun started, beside a torch.distributed of one's own.

    python -m torch.distributed.run --standalone --nproc-per-node 2 -m examples.python.with_torchrun

The first rank has the engine; the others follow it with the same settings until it is closed. torch.distributed is used
as it is, and left alone: it goes on afterwards.
"""

from __future__ import annotations

import torch.distributed as dist

from megatron_ext import RequestParams, follow_engine, load_engine

PROMPTS = ["The import statement", "A list is", "What does a generator do?"]


def main() -> list[str]:
    """Serve some prompts on all ranks together; every rank gets the answers."""
    begun_here = not dist.is_initialized()
    if begun_here:
        dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    settings = {"tensor_model_parallel_size": ranks, "inference_dynamic_batching_block_count": 200}
    answers: list[str] = []
    if dist.get_rank() == 0:
        with load_engine(**settings) as engine:
            records = engine.generate(PROMPTS, RequestParams(num_tokens_to_generate=8))
        answers = [record.generated_text for record in records]
    else:
        follow_engine(**settings)
    shared = [answers]
    dist.broadcast_object_list(shared, src=0)  # of the program's own
    print(f"rank {dist.get_rank()} of {ranks}: {len(shared[0])} answers")
    if begun_here:
        dist.destroy_process_group()
    return shared[0]


if __name__ == "__main__":
    main()
