"""Layout check: sizes must fit the number of ranks and the model, before anything is allocated.

A world of W ranks is T * P * R: T that share each layer, P stages, R replicas. Experts are spread over ranks of all
replicas: the W / P ranks of a stage form E groups of X, and the X ranks of a group share each of its experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from megatron_ext.config import ModelConfig, ParallelConfig
from megatron_ext.config.checks import require
from megatron_ext.config.layers.letters import is_attention, is_mlp
from megatron_ext.errors import ConfigError
from megatron_ext.parallel.stages import split_layers

_MAX_TRIED = 1024  # ranks tried for the sizes that an error suggests
_MAX_SHOWN = 6


@dataclass(frozen=True)
class Layout:
    """Division of a world.

    Attributes:
        world: Number of ranks.
        tensor: Ranks that share each layer.
        pipeline: Stages.
        replicas: Copies of the model, each with its own requests.
        expert: Ranks that have different experts.
        expert_tensor: Ranks that share each expert.
    """

    world: int = 1
    tensor: int = 1
    pipeline: int = 1
    replicas: int = 1
    expert: int = 1
    expert_tensor: int = 1


def plan_layout(parallel: ParallelConfig, world: int, *, is_launched: bool = True, program: str = "") -> Layout:
    """Return the layout of a world.

    Args:
        parallel: Configured sizes.
        world: Number of ranks.
        is_launched: Whether a launcher started the ranks together, see `World`.
        program: Program to start, for the message.

    Raises:
        ConfigError: The sizes do not divide the world; the message has both, and a launch command that fits.
    """
    needed = parallel.smallest_world
    if world % needed:
        flags = parallel.described()
        if not is_launched:
            launch = f"torchrun --nproc-per-node {needed} {program or 'PROGRAM'} {flags}"
            raise ConfigError(f"{flags} needs {needed} ranks, and this is a single process; start it with {launch}")
        larger = f"{needed}, {2 * needed} or another multiple of {needed}"
        raise ConfigError(f"started on {world} ranks, and {flags} needs {needed} or a multiple; start {larger}")
    tensor, pipeline = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    return Layout(
        world=world,
        tensor=tensor,
        pipeline=pipeline,
        replicas=world // (tensor * pipeline),
        expert=parallel.expert_model_parallel_size,
        expert_tensor=parallel.expert_tensor_size,
    )


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
