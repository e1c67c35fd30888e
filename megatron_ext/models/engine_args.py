"""Engine args: load the configured model and build engines on rank 0, workers on the others, or only a plan."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from megatron_ext.config import ParallelConfig
from megatron_ext.config.routing import RoutingConfig
from megatron_ext.config.run import EngineSettings
from megatron_ext.config.speculation import SpeculationConfig
from megatron_ext.errors import ConfigError
from megatron_ext.mcore import platform
from megatron_ext.mcore.adapter import InferenceEngine
from megatron_ext.mcore.assemble import build_engine, build_worker, compile_operators, plan_pools
from megatron_ext.mcore.warm_restart_setup import open_disk_cache, open_rank_store
from megatron_ext.mcore.warm_up import Phase, unreported
from megatron_ext.memory.engine_plan import EnginePlan
from megatron_ext.models.identity import cache_facts, weights_digest
from megatron_ext.models.load import LoadedModel, load_model, save_model
from megatron_ext.models.overrides import within_positions
from megatron_ext.models.update.disk import read_new_weights
from megatron_ext.models.update.naming import naming_of
from megatron_ext.models.update.writer import WeightWriter
from megatron_ext.parallel.parallel_context import ParallelContext
from megatron_ext.parallel.worker import Worker
from megatron_ext.parallel.world import world_of_environment

logger = logging.getLogger(__name__)


class EngineArgs:
    """Model, loaded as the settings say; builds engines around it.

    The model is saved if the settings ask for it.

    Args:
        settings: Model, parallel sizes, batching, caching, speculation.
        parallel_context: All ranks, of which this is the first; None for a world of one.
        phase: Returns a context for each phase of the work, by its name: read, compile, plan; digest of
            weights if the cache is on disk, and warm-up if kernels are compiled.
        loaded: The model, if it is in memory already.

    Raises:
        ConfigError: The model cannot be loaded as the settings say.
    """

    def __init__(
        self,
        settings: EngineSettings,
        parallel_context: ParallelContext | None = None,
        phase: Phase = unreported,
        loaded: LoadedModel | None = None,
    ) -> None:
        self._settings = settings
        self._parallel_context = parallel_context
        self._phase = phase
        if settings.routing != RoutingConfig() and (parallel_context is None or parallel_context.replicas == 1):
            logger.warning("there is one replica, so the policy that chooses replicas has no effect")
        with phase("read"):
            self.loaded = loaded or load(settings)
            check_prediction(settings.speculation, settings.parallel, self.loaded)

    def weight_writer(self) -> WeightWriter:
        """Return the writer of new weights; called before `build_engine`, which may pack them."""
        return weight_writer(self._settings, self._parallel_context, self.loaded)

    def build_engine(self) -> InferenceEngine:
        """Build an engine; its pools are allocated.

        Raises:
            ConfigError: The memory or the block size does not fit the model.
        """
        settings, loaded = self._settings, self.loaded
        cache = settings.cache
        facts = _cache_facts(settings, self._parallel_context, loaded, self._phase)
        with self._phase("compile"):
            compile_operators(loaded.model, settings.batching)
        engine = build_engine(
            loaded.model,
            loaded.config,
            loaded.tokenizer,
            within_positions(settings.batching, settings.source, loaded.config),
            cache,
            dtype=loaded.dtype,
            seed=settings.source.sampling_seed,
            logging_step_interval=settings.logging_step_interval,
            parallel_context=self._parallel_context,
            speculation=settings.speculation,
            packs_weights=_packs_weights(settings, loaded),
            routing=settings.routing,
            phase=self._phase,
        )
        if facts is not None:
            open_disk_cache(engine, facts, cache, self._parallel_context)
        return engine


def follow(
    settings: EngineSettings,
    parallel_context: ParallelContext,
    on_ready: Callable[[], None],
) -> None:
    """Run a worker that repeats rank 0's steps until the stop action; only rank 0 has requests and results.

    Args:
        settings: Settings of rank 0.
        on_ready: Called before the first step: from now on this rank ends when rank 0 does.

    Raises:
        ConfigError: This rank's part of the model cannot be loaded.
        RankError: A rank has failed or does not answer.
    """
    loaded = load(settings)
    writer = weight_writer(settings, parallel_context, loaded)
    follower = build_follower(settings, parallel_context, writer)
    on_ready()
    follower.follow()


def build_follower(settings: EngineSettings, parallel_context: ParallelContext, weight_writer: WeightWriter) -> Worker:
    """Build the worker of a rank other than 0, from rank 0's settings; its pools are allocated."""
    loaded, cache, opener = weight_writer.loaded, settings.cache, None
    facts = _cache_facts(settings, parallel_context, loaded)
    if facts is not None:
        opener = partial(open_rank_store, model=facts, settings=cache, parallel_context=parallel_context)
    worker = build_worker(
        loaded.model,
        loaded.config,
        loaded.tokenizer,
        within_positions(settings.batching, settings.source, loaded.config),
        cache,
        dtype=loaded.dtype,
        parallel_context=parallel_context,
        speculation=settings.speculation,
        packs_weights=_packs_weights(settings, loaded),
        opener=opener,
    )
    worker.on_weights = weight_writer.obey
    return worker


def weight_writer(
    settings: EngineSettings, parallel_context: ParallelContext | None, loaded: LoadedModel
) -> WeightWriter:
    """Return the writer of new weights into this rank's part of a model that was loaded as the settings say."""
    overrides = dict(settings.model_overrides)
    read = partial(read_new_weights, loaded, settings.source, overrides, parallel=settings.parallel)
    naming = naming_of(settings.source, loaded.config)
    return WeightWriter(loaded, parallel_context, naming, read, source_is_gpt=naming.in_gpt)


def _cache_facts(
    settings: EngineSettings, parallel_context: ParallelContext | None, loaded: LoadedModel, phase: Phase = unreported
) -> list[bytes] | None:
    """Return what entries on disk depend on; every rank calls this, before anything packs the weights."""
    if not settings.cache.is_durable:
        return None
    with phase("digest of weights"):
        return cache_facts(loaded, weights_digest(loaded.model), settings.parallel, parallel_context)


def _packs_weights(settings: EngineSettings, loaded: LoadedModel) -> bool:
    given = settings.batching.pack_weights
    return loaded.packs_weights if given is None else given


def load(settings: EngineSettings) -> LoadedModel:
    """Load this rank's part of the configured model; it is saved if the settings ask for it."""
    loaded = _load(settings)
    if settings.source.save is not None:
        save_model(settings.source.save, loaded)
    return loaded


def _load(settings: EngineSettings, device: torch.device | None = None) -> LoadedModel:
    return load_model(
        settings.source,
        dict(settings.model_overrides),
        parallel=settings.parallel,
        device=device,
        reads_prediction=settings.speculation.has_prediction,
    )


def check_prediction(speculation: SpeculationConfig, parallel: ParallelConfig, loaded: LoadedModel) -> None:
    """Check that a model has the layer that is to draft.

    Raises:
        ConfigError: It has none, fewer than drafts if several have weights of their own, or experts that ranks share.
    """
    if not speculation.has_prediction:
        return
    experts = parallel.expert_model_parallel_size
    if experts > 1 and "E" in loaded.config.mtp_pattern:
        raise ConfigError(
            f"--speculative-method mtp and --expert-model-parallel-size {experts} contradict each other: the layer of "
            f"multi-token prediction of {loaded.name} has experts, and a replica computes it alone; leave it out, or "
            "give --speculative-method ngram"
        )
    layers, drafts = loaded.config.mtp_layer_count, speculation.num_speculative_tokens
    if not layers:
        raise ConfigError(
            f"--speculative-method mtp needs layers of multi-token prediction, and {loaded.name} has none; give "
            "--speculative-method ngram"
        )
    if 1 < layers < drafts:
        raise ConfigError(
            f"--num-speculative-tokens {drafts} is more than the {layers} layers of multi-token prediction of "
            f"{loaded.name}, one for each draft; give --num-speculative-tokens {layers}"
        )


@dataclass(frozen=True)
class DryRun:
    """Plan of an engine whose model is not loaded.

    Attributes:
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
    loaded = _load(settings, torch.device("meta"))
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
