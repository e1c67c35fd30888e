"""Share of a model that one rank holds, derived from the sizes alone."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ext.config import ModelConfig, ParallelConfig
from megatron_ext.parallel.layout import check_model
from megatron_ext.parallel.stages import Stage, split_layers


@dataclass(frozen=True)
class Share:
    """One pipeline stage's part of a model, on each of its tensor-parallel ranks.

    Attributes:
        parallel: Parallel sizes.
        stages: Stages of the whole model.
        index: Index of this stage.
    """

    parallel: ParallelConfig
    stages: tuple[Stage, ...]
    index: int

    @property
    def stage(self) -> Stage:
        """Layers of this stage."""
        return self.stages[self.index]

    @property
    def is_first(self) -> bool:
        """True if the embedding is on this stage."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """True if the final norm and the output layer are on this stage."""
        return self.index == len(self.stages) - 1

    def pattern(self, config: ModelConfig) -> str:
        """Return the pattern letters of this stage's layers."""
        return config.hybrid_override_pattern[self.stage.first : self.stage.first + self.stage.count]

    @property
    def core_fields(self) -> dict[str, object]:
        """Sizes and stage boundaries under megatron-core's names."""
        parallel = self.parallel
        return {
            "tensor_model_parallel_size": parallel.tensor_model_parallel_size,
            "pipeline_model_parallel_size": parallel.pipeline_model_parallel_size,
            "expert_model_parallel_size": parallel.expert_model_parallel_size,
            "expert_tensor_parallel_size": parallel.expert_tensor_size,
            **_boundaries([stage.count for stage in self.stages]),
        }

    @property
    def needs_layer_layout(self) -> bool:
        """True if the sizes of the first and last stage do not determine the boundaries, see `core_fields`."""
        return _LAYOUT in self.core_fields


def share_of(parallel: ParallelConfig, config: ModelConfig, index: int) -> Share:
    """Return the share of stage `index`.

    Raises:
        ConfigError: The model cannot be divided by the sizes.
    """
    check_model(parallel, config)
    return Share(parallel, split_layers(config.layer_count, parallel), index)


_FIRST, _LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
_LAYOUT = "pipeline_model_parallel_layout"


def _boundaries(counts: list[int]) -> dict[str, object]:
    """Return megatron-core's stage boundaries: none for equal stages, its two flags if enough, or a layout.

    A layout is one letter per layer, with the embedding before and the loss after them: `Ettt|tt|ttL`.
    """
    for first, last in ((0, 0), (1, 0), (0, 1), (1, 1)):
        if len(set(counts[first : len(counts) - last])) <= 1:
            return {**({_FIRST: counts[0]} if first else {}), **({_LAST: counts[-1]} if last else {})}
    return {_LAYOUT: "E" + "|".join("t" * count for count in counts) + "L"}
