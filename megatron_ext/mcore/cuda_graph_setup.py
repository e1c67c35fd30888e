"""Setup of the CUDA graph runner, if an engine's settings and model allow one."""

from __future__ import annotations

import logging

from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import nn

from megatron_ext.config import BatchingConfig
from megatron_ext.mcore.context import InferenceContext
from megatron_ext.mcore.controller import InferenceController
from megatron_ext.mcore.cuda_graph_runner import CudaGraphRunner
from megatron_ext.mcore.layers.dense_moe import problem_of
from megatron_ext.runner.cuda_graphs.buckets import Buckets
from megatron_ext.runner.cuda_graphs.graph_capture import CudaGraphs, NoGraphs

logger = logging.getLogger(__name__)


def cuda_graph_runner_for(
    context: InferenceContext, controller: InferenceController, batching: BatchingConfig, *, is_alone: bool
) -> CudaGraphRunner | None:
    """Return the CUDA graph runner that `batching` asks for; None if it asks for none or the model cannot have one.

    The reason is logged once per engine.

    Args:
        context: Context whose plan was made with the same settings.
        controller: Controller around the model.
        batching: Settings.
        is_alone: Whether there are no other ranks.
    """
    if not batching.has_input_buffers:
        return None
    problem = _problem(controller.inference_wrapped_model.model, is_alone=is_alone)
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
    return CudaGraphRunner(context, controller, buckets, CudaGraphs(rules.device) if is_cuda else NoGraphs())


def _problem(model: nn.Module, *, is_alone: bool) -> str | None:
    if not is_alone:
        return "several ranks send each other what a program has no place for"
    problems = (problem_of(module.experts) for module in model.modules() if isinstance(module, MoELayer))
    return next((one for one in problems if one is not None), None)
