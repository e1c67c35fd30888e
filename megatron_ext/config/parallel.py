"""Parallelism settings: the distribution of a model over ranks."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from megatron_ext.config.options import flag_of, option, require, require_options

LARGEST_WORLD = 2**20  # ranks; a larger number is a mistake
LONGEST_TIMEOUT = 60 * 24 * 365  # minutes


@dataclass(frozen=True)
class ParallelConfig:
    """Sizes of the process groups, with Megatron's names, and the communication backend.

    `parallel.layout` checks the sizes against the model and the number of ranks.
    """

    tensor_model_parallel_size: int = option(
        1, "Number of ranks that each layer is split over", minimum=1, maximum=LARGEST_WORLD
    )
    pipeline_model_parallel_size: int = option(
        1, "Number of ranks that the stack of layers is split over", minimum=1, maximum=LARGEST_WORLD
    )
    expert_model_parallel_size: int = option(
        1, "Number of ranks that the experts are distributed over", minimum=1, maximum=LARGEST_WORLD
    )
    expert_tensor_parallel_size: int | None = option(
        None,
        "Number of ranks that each expert is split over; default: --tensor-model-parallel-size",
        minimum=1,
        maximum=LARGEST_WORLD,
    )
    num_layers_in_first_pipeline_stage: int | None = option(
        None,
        "Number of layers in the first stage; default: even; the first stages take the remainder",
        minimum=1,
        maximum=LARGEST_WORLD,
    )
    num_layers_in_last_pipeline_stage: int | None = option(
        None, "Number of layers in the last stage; default: even", minimum=1, maximum=LARGEST_WORLD
    )
    distributed_backend: str | None = option(
        None, "Communication backend of the ranks; default: nccl on CUDA, gloo elsewhere", choices=("nccl", "gloo")
    )
    distributed_timeout_minutes: float = option(
        10.0, "Minutes that a rank waits for another one before all ranks end", above=0, maximum=LONGEST_TIMEOUT
    )  # Megatron-LM's default
    check_ranks: bool = option(
        False, "Compare the scheduled step of all ranks before each step, and end all ranks if they differ"
    )

    def __post_init__(self) -> None:
        require_options(self)
        for name in _UNEVEN:
            given = getattr(self, name)
            require(
                given is None or self.pipeline_model_parallel_size > 1,
                f"{flag_of(name)} {given} is for several stages; give --pipeline-model-parallel-size 2 or more, or "
                "leave it out",
            )
        tensor, expert_tensor = self.tensor_model_parallel_size, self.expert_tensor_size
        require(
            tensor % expert_tensor == 0,
            f"--expert-tensor-parallel-size {expert_tensor} must divide --tensor-model-parallel-size {tensor}: ranks "
            "that share an expert share the layers, too",
        )
        require(
            not self.check_ranks or self.smallest_world == tensor * self.pipeline_model_parallel_size,
            f"--check-ranks and --expert-model-parallel-size {self.expert_model_parallel_size} contradict each other: "
            "replicas that share experts compute their steps at once, and are compared one after the other; leave "
            "--check-ranks out",
        )

    @property
    def expert_tensor_size(self) -> int:
        """Number of ranks that share each expert."""
        return self.expert_tensor_parallel_size or self.tensor_model_parallel_size

    @property
    def smallest_world(self) -> int:
        """Smallest number of ranks for these sizes; every valid world size is a multiple of it."""
        stage = math.lcm(self.tensor_model_parallel_size, self.expert_tensor_size * self.expert_model_parallel_size)
        return stage * self.pipeline_model_parallel_size

    def described(self) -> str:
        """Return the sizes that differ from their defaults as flags; empty if all are defaults."""
        plain = ParallelConfig()
        given = {one.name: getattr(self, one.name) for one in dataclasses.fields(self) if one.name in _SIZES}
        return " ".join(f"{flag_of(name)} {size}" for name, size in given.items() if size != getattr(plain, name))


_UNEVEN = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
_SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    *_UNEVEN,
)
