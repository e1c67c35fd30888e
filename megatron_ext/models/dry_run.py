"""Plan of an engine from a model's configuration alone: what `--dry-run` prints, before any weight is read."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_ext.config.run import EngineSettings
from megatron_ext.errors import ConfigError
from megatron_ext.mcore import platform
from megatron_ext.mcore.assemble import plan_pools
from megatron_ext.memory.engine_plan import EnginePlan
from megatron_ext.models.load import load_model
from megatron_ext.models.overrides import within_positions
from megatron_ext.parallel.world import world_of_environment


@dataclass(frozen=True)
class DryRun:
    """Plan of an engine whose model is not loaded.

    Attributes:
        name: Name of the model.
        plan: Plan of the engine, as a start with the same settings and memory makes it.
        weight_bytes: Bytes of the parameters in their types, as they are before anything quantizes them.
        dtype: Type of most parameters.
        free_bytes: Bytes that this process could allocate now.
    """

    name: str
    plan: EnginePlan
    weight_bytes: int
    dtype: torch.dtype
    free_bytes: int

    def requests_at_once(self, tokens: int) -> int:
        """Return how many requests of a length fit at once, with nothing in common; 0 if one is too long."""
        limits = self.plan.limits
        if tokens > limits.max_model_len:
            return 0
        return min(limits.max_requests, limits.total_blocks // limits.blocks_for(tokens))


def plan_without_weights(settings: EngineSettings) -> DryRun:
    """Plan the engine of the settings; no weight is read, and no pool allocated.

    Raises:
        ConfigError: What a start would refuse about sizes and memory; or there are several ranks.
    """
    if world_of_environment().size > 1:
        raise ConfigError("--dry-run plans a single rank; leave torchrun out")
    device = platform.device()
    loaded = load_model(
        settings.source,
        dict(settings.model_overrides),
        parallel=settings.parallel,
        device=torch.device("meta"),
        reads_prediction=settings.speculation.has_prediction,
    )
    weights = sum(one.numel() * one.element_size() for one in loaded.model.parameters())
    free = platform.available_memory(device)
    plan = plan_pools(
        loaded.model,
        loaded.config,
        within_positions(settings.batching, settings.source, loaded.config),
        settings.cache,
        dtype=loaded.dtype,
        device=device,
        available_bytes=free - weights,
        speculation=settings.speculation,
    )
    return DryRun(loaded.name, plan, weights, loaded.dtype, free)
