"""Layout of a world and of a model over its ranks; sizes must fit both, before anything is allocated.

A world of W ranks is T * P * R: T that share each layer, P stages, R replicas. Experts are spread over ranks of all
replicas: the W / P ranks of a stage form E groups of X, and the X ranks of a group share each of its experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate

from megatron_ext.config import ModelConfig, ParallelConfig
from megatron_ext.config.layers import is_attention, is_mlp
from megatron_ext.config.options import require
from megatron_ext.errors import ConfigError

_MAX_TRIED = 1024  # ranks tried for the sizes that an error suggests
_MAX_SHOWN = 6
_FIRST, _LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
_LAYOUT = "pipeline_model_parallel_layout"


def split_layers(layers: int, parallel: ParallelConfig) -> tuple[range, ...]:
    """Split a model of `layers` layers into stages; megatron-core would drop the remainder of an uneven division.

    Args:
        layers: Number of layers of every kind.
        parallel: Number of stages, and optionally the layers of the first and the last. The remaining layers are
            divided among the other stages, and the first of these hold one more if the division is not even.

    Returns:
        Numbers of each stage's layers, from 0; no stage is empty.

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
    ends = accumulate(counts)
    return tuple(range(end - count, end) for end, count in zip(ends, counts, strict=True))


def describe_stages(pattern: str, stages: tuple[range, ...]) -> str:
    """Describe each stage's layers in one line: `2 pipeline stages: 3 layers (M-*), 2 layers (M-)`."""
    parts = (f"{len(stage)} layers ({pattern[stage.start : stage.stop]})" for stage in stages)
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


def check_world(parallel: ParallelConfig, world: int, *, is_launched: bool = True, program: str = "") -> None:
    """Check that the sizes divide a world.

    Args:
        parallel: Configured sizes.
        world: Number of ranks.
        is_launched: Whether a launcher started the ranks together, see `World`.
        program: Program to start, for the message.

    Raises:
        ConfigError: They do not; the message has both, and a launch command that fits.
    """
    needed, flags = parallel.smallest_world, parallel.described()
    if world % needed == 0:
        return
    if not is_launched:
        launch = f"torchrun --nproc-per-node {needed} {program or 'PROGRAM'} {flags}"
        raise ConfigError(f"{flags} needs {needed} ranks, and this is a single process; start it with {launch}")
    larger = f"{needed}, {2 * needed} or another multiple of {needed}"
    raise ConfigError(f"started on {world} ranks, and {flags} needs {needed} or a multiple; start {larger}")


def check_model(parallel: ParallelConfig, config: ModelConfig) -> None:
    """Check that a model can be divided by the sizes.

    Raises:
        ConfigError: It cannot; the message has the two numbers that do not fit, and the sizes that would.
    """
    split_layers(config.layer_count, parallel)
    tensor, expert = parallel.tensor_model_parallel_size, parallel.expert_model_parallel_size
    _check("--tensor-model-parallel-size", tensor, lambda size: _tensor_misfits(config, size))
    if not config.is_moe:
        require(
            expert == 1 and parallel.expert_tensor_parallel_size in (None, 1, tensor),
            f"{parallel.described()} distributes experts, and pattern {config.hybrid_override_pattern!r} has no MoE "
            f"layer; leave --expert-model-parallel-size and --expert-tensor-parallel-size out",
        )
        return
    require(
        config.disable_bias_linear or parallel.expert_tensor_size == 1,
        f"{parallel.described()} splits each expert over {parallel.expert_tensor_size} ranks, and experts have biases; "
        "give --expert-tensor-parallel-size 1",
    )
    experts = config.num_experts or 0
    _check("--expert-model-parallel-size", expert, lambda size: _unshared({"experts": experts}, size))
    widths = {"channels inside an expert (--moe-ffn-hidden-size)": config.expert_ffn_size}
    _check("--expert-tensor-parallel-size", parallel.expert_tensor_size, lambda size: _unshared(widths, size))


def _check(flag: str, size: int, misfits: Callable[[int], Iterator[str]]) -> None:
    """Raise if a size has a misfit."""
    problem = next(misfits(size), None)
    if problem is None:
        return
    fitting = [str(other) for other in range(1, _MAX_TRIED) if next(misfits(other), None) is None]
    shown = ", ".join(fitting[:_MAX_SHOWN]) + (", ..." if len(fitting) > _MAX_SHOWN else "")
    raise ConfigError(f"{problem} cannot be split over {flag} {size} ranks; this model can be split over {shown}")


def _tensor_misfits(config: ModelConfig, size: int) -> Iterator[str]:
    """Yield the properties of a model that `size` tensor-parallel ranks cannot share."""
    pattern = config.hybrid_override_pattern
    if config.is_hybrid:
        yield from _unshared(config.recurrent.shared(config), size)
    if any(map(is_attention, pattern)):
        yield from _attention_misfits(config, size)
    if any(map(is_mlp, pattern)):
        yield from _unshared({"channels inside an MLP (--ffn-hidden-size)": config.ffn_size}, size)
    if config.is_moe and config.moe_shared_expert_intermediate_size:
        yield from _unshared({"channels inside the shared experts": config.moe_shared_expert_intermediate_size}, size)


def _attention_misfits(config: ModelConfig, size: int) -> Iterator[str]:
    """Yield the misfits of attention: heads are shared evenly; fewer query groups than ranks are replicated."""
    heads, groups = config.num_attention_heads, config.query_groups
    yield from _unshared({"attention heads": heads}, size)
    if groups % size and size % groups:
        yield f"{groups} query groups"
    rows = (heads * (1 + config.attention_output_gate) + 2 * groups) * config.head_channels
    yield from _unshared({"rows of the query, key and value projection": rows}, size)
    if config.qk_layernorm_over_heads and size > 1:
        yield "a norm of the queries of all heads together (qk_layernorm_over_heads)"


def _unshared(numbers: dict[str, int], size: int) -> Iterator[str]:
    yield from (f"{number} {what}" for what, number in numbers.items() if number % size)


@dataclass(frozen=True)
class Share:
    """One pipeline stage's part of a model, on each of its tensor-parallel ranks.

    Attributes:
        parallel: Parallel sizes.
        stages: Numbers of the layers of each stage of the whole model.
        index: Index of this stage.
    """

    parallel: ParallelConfig
    stages: tuple[range, ...]
    index: int

    @property
    def stage(self) -> range:
        """Numbers of the layers of this stage."""
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
        return config.hybrid_override_pattern[self.stage.start : self.stage.stop]

    @property
    def core_fields(self) -> dict[str, object]:
        """Sizes and stage boundaries under megatron-core's names."""
        parallel = self.parallel
        return {
            "tensor_model_parallel_size": parallel.tensor_model_parallel_size,
            "pipeline_model_parallel_size": parallel.pipeline_model_parallel_size,
            "expert_model_parallel_size": parallel.expert_model_parallel_size,
            "expert_tensor_parallel_size": parallel.expert_tensor_size,
            **_boundaries([len(stage) for stage in self.stages]),
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


def _boundaries(counts: list[int]) -> dict[str, object]:
    """Return megatron-core's stage boundaries: none for equal stages, its two flags if enough, or a layout.

    A layout is one letter per layer, with the embedding before and the loss after them: `Ettt|tt|ttL`.
    """
    for first, last in ((0, 0), (1, 0), (0, 1), (1, 1)):
        if len(set(counts[first : len(counts) - last])) <= 1:
            return {**({_FIRST: counts[0]} if first else {}), **({_LAST: counts[-1]} if last else {})}
    return {_LAYOUT: "E" + "|".join("t" * count for count in counts) + "L"}
