"""What one rank holds of a model, from the sizes alone."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ext.config import ModelConfig, ParallelConfig
from megatron_ext.parallel.layout import check_model
from megatron_ext.parallel.stages import Stage, split_layers


@dataclass(frozen=True)
class Share:
    """One pipeline stage's part of a model, as each of its tensor-parallel ranks has it.

    Attributes:
        parallel: The sizes.
        stages: Of the whole model.
        index: Which of them this is.
    """

    parallel: ParallelConfig
    stages: tuple[Stage, ...]
    index: int

    @property
    def stage(self) -> Stage:
        """This stage's layers."""
        return self.stages[self.index]

    @property
    def is_first(self) -> bool:
        """Whether the embedding is here."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether the final norm and the output layer are here."""
        return self.index == len(self.stages) - 1

    def pattern(self, config: ModelConfig) -> str:
        """The letters of this stage's layers."""
        return config.hybrid_override_pattern[self.stage.first : self.stage.first + self.stage.count]

    @property
    def core_fields(self) -> dict[str, object]:
        """The sizes, and what says where stages begin, under megatron-core's names."""
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
        """Whether numbers of the first and the last stage do not say where stages begin, see `core_fields`."""
        return _LAYOUT in self.core_fields


def share_of(parallel: ParallelConfig, config: ModelConfig, index: int) -> Share:
    """What stage `index` holds.

    Raises:
        ConfigError: The model cannot be spread like that.
    """
    check_model(parallel, config)
    return Share(parallel, split_layers(config.layer_count, parallel), index)


_FIRST, _LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
_LAYOUT = "pipeline_model_parallel_layout"


def _boundaries(counts: list[int]) -> dict[str, object]:
    """Nothing for equal stages, else what makes megatron-core see them: its two flags if they do, or a layout.

    A layout is one letter a layer, with the embedding in front and the loss behind: `Ettt|tt|ttL`.
    """
    for first, last in ((0, 0), (1, 0), (0, 1), (1, 1)):
        if len(set(counts[first : len(counts) - last])) <= 1:
            return {**({_FIRST: counts[0]} if first else {}), **({_LAST: counts[-1]} if last else {})}
    return {_LAYOUT: "E" + "|".join("t" * count for count in counts) + "L"}
