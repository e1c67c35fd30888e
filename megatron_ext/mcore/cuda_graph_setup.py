"""Setup of the CUDA graph runner, if an engine's settings and model allow one."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor

from megatron_ext.config import BatchingConfig
from megatron_ext.mcore import platform
from megatron_ext.mcore.context import InferenceContext
from megatron_ext.mcore.controller import InferenceController
from megatron_ext.mcore.cuda_graph_ranks import uncaptured_sizes
from megatron_ext.mcore.layers.dense_moe import fixed_shapes, problem_of
from megatron_ext.memory.pools import Pools
from megatron_ext.runner.cuda_graphs.buckets import Buckets
from megatron_ext.runner.cuda_graphs.cuda_graph_runner import CudaGraphRunner
from megatron_ext.runner.cuda_graphs.graph_capture import Capture, CudaGraphs, NoGraphs
from megatron_ext.runner.model_input import ModelInput
from megatron_ext.scheduling.step import ScheduledChunk

logger = logging.getLogger(__name__)


def cuda_graph_runner_for(
    context: InferenceContext, controller: InferenceController, batching: BatchingConfig, *, has_peers: bool
) -> CudaGraphRunner | None:
    """Return the CUDA graph runner that `batching` asks for; None if it asks for none or the model cannot have one.

    The reason is logged once per engine.

    Args:
        context: Context whose plan was made with the same settings.
        controller: Controller around the model.
        batching: Settings.
        has_peers: See `CudaGraphRunner`.
    """
    if not batching.has_input_buffers:
        return None
    problem = (uncaptured_sizes(platform.group_sizes()) if has_peers else None) or _problem(controller)
    if problem is not None:
        logger.warning("--cuda-graph-impl local: every step is eager, since %s", problem)
        return None
    rules, limits = context.staging_rules, context.plan.limits
    is_cuda = rules.device.type == "cuda"
    buckets = Buckets(
        limits,
        batching.graph_sizes,
        rules.kernel_chunk,
        snapshots_in_prefill=rules.snapshots_in_prefill,
        one_width=is_cuda,
    )
    graphs = CudaGraphs(rules.device) if is_cuda else NoGraphs()
    return new_runner(context, controller, buckets, graphs, has_peers=has_peers)


def new_runner(
    context: InferenceContext,
    controller: InferenceController,
    buckets: Buckets,
    graphs: Capture,
    *,
    has_peers: bool = False,
) -> CudaGraphRunner:
    """Return a runner of captured steps around the controller's model."""
    model = _ContextModel(context, controller)
    return CudaGraphRunner(model, context.plan, context.staging_rules, buckets, graphs, has_peers=has_peers)


class _ContextModel:
    """`CapturedModel` of a context and a controller."""

    def __init__(self, context: InferenceContext, controller: InferenceController) -> None:
        self._context, self._controller = context, controller
        self.vocabulary_size = controller.vocabulary_size

    @property
    def operators(self) -> str | None:
        """Backend name of the operators, or None; may change during a run."""
        return self._controller.operators

    @property
    def pools(self) -> Pools | None:
        """Pools of the context; None while they are freed."""
        return self._context.pools

    def weight_addresses(self) -> tuple[int, ...]:
        """Return the memory addresses of parameters and buffers."""
        return self._controller.weight_addresses()

    def forward(self, step: ModelInput) -> Tensor:
        """Return the logits of a step [rows, V], computed in fixed shapes."""
        self._context.begin(step)
        try:
            with fixed_shapes():
                logits = self._controller.forward()
        finally:
            self._context.clear_step()
        assert logits is not None, "the last stage is here"
        return logits[0]

    def writing(self, chunks: Sequence[ScheduledChunk]) -> AbstractContextManager[None]:
        """Return a context in which hidden states of the chunks are written, if layers draft."""
        states = self._controller.hidden_states
        return nullcontext() if states is None else states.writing(chunks)


def _problem(controller: InferenceController) -> str | None:
    if controller.records_routing:
        return "--moe-enable-routing-replay reads the experts of each token after a step"
    model = controller.inference_wrapped_model.model
    problems = (problem_of(module.experts) for module in model.modules() if isinstance(module, MoELayer))
    return next((one for one in problems if one is not None), None)
