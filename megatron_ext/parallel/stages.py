"""Pipeline stages: the layers of each stage; every layer is on one stage, in order.

megatron-core divides the number of layers by the number of stages and drops the remainder; here the first stages hold
one more layer each.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ext.config.checks import require
from megatron_ext.config.parallel import ParallelConfig


@dataclass(frozen=True)
class Stage:
    """Consecutive layers of one pipeline stage.

    Attributes:
        first: Number of its first layer, from 0, in the whole model.
        count: Number of its layers; never zero.
    """

    first: int
    count: int

    @property
    def layers(self) -> range:
        """Numbers of the stage's layers."""
        return range(self.first, self.first + self.count)


def split_layers(layers: int, parallel: ParallelConfig) -> tuple[Stage, ...]:
    """Split a model of `layers` layers into stages.

    Args:
        layers: Number of layers of every kind.
        parallel: Number of stages, and optionally the layers of the first and the last. The remaining layers are
            divided among the other stages, and the first of these hold one more if the division is not even.

    Raises:
        ConfigError: A stage would be left without a layer, or a layer without a stage.
    """
    size = parallel.pipeline_model_parallel_size
    require(
        layers >= size,
        f"{layers} layers cannot be split over --pipeline-model-parallel-size {size} stages; give at most {layers}",
    )
    first, last = parallel.num_layers_in_first_pipeline_stage, parallel.num_layers_in_last_pipeline_stage
    given = (first or 0) + (last or 0)
    others = size - (first is not None) - (last is not None)
    _check_given(layers, parallel, others, given)
    counts = _evenly(layers - given, others)
    if first is not None:
        counts = [first, *counts]
    if last is not None:
        counts = [*counts, last]
    starts = [sum(counts[:index]) for index in range(size)]
    return tuple(Stage(start, count) for start, count in zip(starts, counts, strict=True))


def describe_stages(pattern: str, stages: tuple[Stage, ...]) -> str:
    """Describe each stage's layers in one line: `2 pipeline stages: 3 layers (M-*), 2 layers (M-)`."""
    parts = (f"{stage.count} layers ({pattern[stage.first : stage.first + stage.count]})" for stage in stages)
    return f"{len(stages)} pipeline stages: {', '.join(parts)}"


def _check_given(layers: int, parallel: ParallelConfig, others: int, given: int) -> None:
    """Check that the first and last stage leave enough layers for the others, and none if there are no others."""
    first, last = parallel.num_layers_in_first_pipeline_stage, parallel.num_layers_in_last_pipeline_stage
    flags = [
        f"--num-layers-in-{name}-pipeline-stage {count}"
        for name, count in (("first", first), ("last", last))
        if count is not None
    ]
    left = layers - given
    if others == 0:
        require(left == 0, f"{' and '.join(flags)} are {given} of {layers} layers; together they must be {layers}")
        return
    require(
        left >= others,
        f"{' and '.join(flags)} of {layers} layers leave {max(0, left)} for {others} other stages, which need one "
        f"each; together they must be at most {layers - others}",
    )


def _evenly(layers: int, stages: int) -> list[int]:
    """Divide layers evenly over stages, one more on each of the first ones."""
    return [layers // stages + (index < layers % stages) for index in range(stages)] if stages else []
