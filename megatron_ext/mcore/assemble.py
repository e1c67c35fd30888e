"""Assembly of an engine around a model: wrapper, context and controller."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

import torch

from megatron_ext.config import BatchingConfig, CacheConfig, ModelConfig
from megatron_ext.config.routing import RoutingConfig
from megatron_ext.config.speculation import NO_SPECULATION, SpeculationConfig
from megatron_ext.errors import ConfigError
from megatron_ext.mcore import platform
from megatron_ext.mcore.adapter import InferenceEngine
from megatron_ext.mcore.context import InferenceContext
from megatron_ext.mcore.controller import InferenceController
from megatron_ext.mcore.core_factory import ContextResources, make_scheduler
from megatron_ext.mcore.cuda_graph_setup import Communication, check_ranks, cuda_graph_runner_for, recorded_steps_for
from megatron_ext.mcore.draft_cost_measurement import measure_costs
from megatron_ext.mcore.layers.hybrid_model import HybridModel
from megatron_ext.mcore.layers.layer_map import layer_indices, model_shape
from megatron_ext.mcore.layers.moe import check_routing_is_recorded
from megatron_ext.mcore.multi_token_engine import PredictionDrafterBuilder, PredictionLayerDrafter
from megatron_ext.mcore.packed_weights import pack_weights
from megatron_ext.mcore.step_executor import StepExecutor
from megatron_ext.mcore.versions import wrap
from megatron_ext.mcore.warm_up import Phase, WarmUpPart, unreported, warm_up
from megatron_ext.mcore.weight_changes import samples_of
from megatron_ext.memory.budget import NO_DRAFT_LAYERS, DraftMemory
from megatron_ext.memory.capacity import NO_PEERS, Peers
from megatron_ext.memory.engine_plan import EnginePlan, plan_engine
from megatron_ext.ops import backend_selection, cpp
from megatron_ext.ops.backends import AUTO
from megatron_ext.ops.linear import onednn
from megatron_ext.parallel.parallel_context import ParallelContext
from megatron_ext.parallel.worker import Worker
from megatron_ext.prefix_cache.disk.warm_restart import WarmRestart
from megatron_ext.speculation.drafter import Drafter
from megatron_ext.speculation.drafting import Drafting
from megatron_ext.speculation.multi_token import LayeredDrafter

logger = logging.getLogger(__name__)


def build_engine(
    model: HybridModel,
    config: ModelConfig,
    tokenizer: object,
    batching: BatchingConfig,
    cache: CacheConfig | None = None,
    *,
    dtype: torch.dtype,
    seed: int = 1234,
    logging_step_interval: int | None = 0,
    parallel_context: ParallelContext | None = None,
    drafter: Drafter | None = None,
    speculation: SpeculationConfig = NO_SPECULATION,
    packs_weights: bool = False,
    routing: RoutingConfig | None = None,
    phase: Phase = unreported,
) -> InferenceEngine:
    """Build the engine; the pools are allocated on the model's device, and kernels are warmed up.

    With several ranks, rank 0 calls this and all others call `build_worker` with the same settings.

    Args:
        cache: Prefix caching; its defaults if missing.
        tokenizer: Needs tokenize, detokenize, eod and bos.
        dtype: Type of the parameters and of the KV cache.
        parallel_context: All ranks; None for a world of one.
        drafter: Replaces the drafter that `speculation` selects, without a measurement of costs; on rank 0 only.
        speculation: Speculation settings, the same on all ranks.
        packs_weights: Let packed weights replace the weights of linear layers, see `packed_weights`.
        routing: Policy that chooses among replicas; on rank 0 only.
        phase: Returns the context of a phase of the start by its name: plan; on CUDA also warm-up and profile run.

    Raises:
        ConfigError: The budget or the block size does not fit the model.
    """
    with phase("plan"):
        settings = batching, cache or CacheConfig(), speculation, packs_weights
        controller, layers = _build_controller(model, config, tokenizer, *settings, dtype, parallel_context)
        context = controller.inference_wrapped_model.inference_context
        controller.drafter = drafter
        drafting_model = own = _drafter_of(layers)
        if speculation.has_prediction and parallel_context is not None:
            drafting_model = controller.leading_drafter = parallel_context.leading_drafter(own)
        if speculation.is_on and drafter is None:
            drafting = Drafting(speculation, drafting_model)
            context.drafting = controller.drafter = drafting
        engine = InferenceEngine(
            controller,
            context,
            random_seed=seed,
            inference_logging_step_interval=logging_step_interval,
            parallel_context=parallel_context,
            routing=routing,
        )
    warm_up(_parts_to_warm_up(controller, layers, parallel_context), phase)
    if speculation.measures_costs:
        if drafter is None:
            with phase("draft costs"):
                measure_costs(engine, drafting)
        engine.core.workers.release()
    return engine


def plan_pools(
    model: HybridModel,
    config: ModelConfig,
    batching: BatchingConfig,
    cache: CacheConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    available_bytes: int,
    speculation: SpeculationConfig,
) -> EnginePlan:
    """Return the plan of an engine on a device, from the shapes of a model, which need no memory.

    Args:
        model: Whole model, on any device.
        available_bytes: Memory for the pools, after the weights.

    Raises:
        ConfigError: The budget or the block size does not fit the model.
    """
    return plan_engine(
        model_shape(model, batching, dtype),
        config,
        batching,
        cache,
        device_type=device.type,
        available_bytes=available_bytes,
        speculative_tokens=speculation.num_speculative_tokens,
        draft=_draft_memory(_prediction_of(model, config, dtype, speculation), batching),
    )


def _prediction_of(
    model: HybridModel, config: ModelConfig, dtype: torch.dtype, speculation: SpeculationConfig
) -> PredictionDrafterBuilder | None:
    """Return the parts of a drafting layer; None if the settings ask for none, or it is on another stage."""
    if not speculation.has_prediction or model.mtp is None:
        return None
    return PredictionDrafterBuilder(model, config, dtype, speculation.num_speculative_tokens)


def _draft_memory(prediction: PredictionDrafterBuilder | None, batching: BatchingConfig) -> DraftMemory:
    return NO_DRAFT_LAYERS if prediction is None else prediction.memory(batching)


def _drafter_of(layers: Sequence[PredictionLayerDrafter]) -> Drafter | None:
    """Return the drafter of all depths; None without any."""
    return LayeredDrafter(layers) if len(layers) > 1 else next(iter(layers), None)


def _parts_to_warm_up(
    controller: InferenceController, layers: Sequence[PredictionLayerDrafter], parallel: ParallelContext | None
) -> list[WarmUpPart]:
    """Return the models whose kernels are warmed up, the same on all ranks, whose steps communicate.

    Layers of further depths launch the kernels of the first one.
    """
    whole = WarmUpPart.of(controller.inference_wrapped_model.inference_context, controller)
    if not layers:
        return [whole]
    if parallel is not None and any(place.pipeline for place in parallel.places):
        if whole.is_needed:
            logger.warning("kernels of the drafting layer are not warmed up: only the last pipeline stage has them")
        return [whole]
    return [whole, layers[0].warm_up_part(whole)]


def build_worker(
    model: HybridModel,
    config: ModelConfig,
    tokenizer: object,
    batching: BatchingConfig,
    cache: CacheConfig | None = None,
    *,
    dtype: torch.dtype,
    parallel_context: ParallelContext,
    speculation: SpeculationConfig = NO_SPECULATION,
    packs_weights: bool = False,
    opener: Callable[[InferenceController], WarmRestart | None] | None = None,
) -> Worker:
    """Build the worker that replaces the engine on a rank other than 0; see `build_engine`.

    Args:
        speculation: See `build_engine`.
        opener: Opens the store of this rank's part of the cache; None if it is not kept.
    """
    settings = batching, cache or CacheConfig(), speculation, packs_weights
    controller, layers = _build_controller(model, config, tokenizer, *settings, dtype, parallel_context)
    context = controller.inference_wrapped_model.inference_context
    executor = parallel_context.executor(parallel_context.here.replica, StepExecutor(context, controller))
    worker = Worker(
        parallel_context.here.replica,
        parallel_context.link,
        partial(make_scheduler, context.plan),
        executor,
        ContextResources(context, controller),
    )
    if speculation.has_prediction:
        context.drafting = layer = _drafter_of(layers)
        worker.drafter = parallel_context.drafter(parallel_context.here.replica, layer)
    context.prepare_cuda_graphs()
    warm_up(_parts_to_warm_up(controller, layers, parallel_context), is_visible=False)
    if opener is not None:
        worker.open_store = partial(opener, controller)
    if speculation.measures_costs:
        worker.follow()  # until rank 0 has measured them
    return worker


def compile_operators(model: HybridModel, batching: BatchingConfig) -> None:
    """Compile the operators for this CPU if that is to be done, rather than while the first request waits."""
    uses_cpp = batching.operator_backend in (AUTO, onednn.NAME)
    if uses_cpp and next(model.parameters()).device.type == "cpu":
        cpp.are_used()


def _build_controller(
    model: HybridModel,
    config: ModelConfig,
    tokenizer: object,
    batching: BatchingConfig,
    cache: CacheConfig,
    speculation: SpeculationConfig,
    packs_weights: bool,
    dtype: torch.dtype,
    parallel_context: ParallelContext | None,
) -> tuple[InferenceController, list[PredictionLayerDrafter]]:
    """Build the controller of this rank's engine or worker, and the drafters of layers, by depth."""
    device = next(model.parameters()).device
    backend_selection.check(batching.operator_backend, device)
    if batching.quantizes_weights and (not packs_weights or samples_of(model) is not None):
        raise ConfigError(
            f"--cpu-weight-quantization {batching.cpu_weight_quantization} would replace the weights of a model that "
            "its owner uses as well; leave it out, or load the model here"
        )
    if parallel_context is not None:
        if batching.suspend_level == "offload":
            raise ConfigError(
                "--rl-kv-cache-management-mode offload works with one rank; give persist or recompute for several"
            )
        check_ranks(batching, Communication.here(device), device)
    compile_operators(model, batching)
    # Weights are packed before the memory for the pools is measured.
    packed, identity = pack_weights(model, batching, parallel_context) if packs_weights else (None, "")
    prediction = _prediction_of(model, config, dtype, speculation)
    plan = plan_engine(
        model_shape(model, batching, dtype),
        config,
        batching,
        cache,
        device_type=device.type,
        available_bytes=platform.available_memory(device),
        peers=NO_PEERS
        if parallel_context is None
        else Peers(parallel_context.here.rank, parallel_context.ranks_of(0), parallel_context.ask_all),
        speculative_tokens=speculation.num_speculative_tokens,
        draft=_draft_memory(prediction, batching),
        linear=identity,
    )
    context = InferenceContext(plan, layer_indices(model.decoder.layer_type_list), device)
    context.suspend_level = batching.suspend_level
    assert config.vocab_size is not None, "the model was built with one"
    controller = InferenceController(wrap(model.eval(), context, config.vocab_size), tokenizer, config.vocab_size)
    controller.operators = batching.operator_backend
    controller.packed = packed
    controller.has_processed_log_probs = batching.has_processed_log_probs
    if batching.moe_enable_routing_replay:
        check_routing_is_recorded(model)
        controller.records_routing = True
        if parallel_context is not None:
            parallel_context.records_routing = True
    is_alone = parallel_context is None
    context.cuda_graph_runner = cuda_graph_runner_for(context, controller, batching, has_peers=not is_alone)
    context.recorded_steps = recorded_steps_for(context, controller, batching, is_alone=is_alone)
    if prediction is None:
        return controller, []
    layers = prediction.layers(context, batching)
    controller.hidden_states = layers[0].hidden_states
    if context.recorded_steps is not None:
        context.recorded_steps.keep(layers[0].hidden_states)
    return controller, layers
