"""Setup of captured and of recorded steps, if an engine's settings, model and ranks allow them.

A captured step has the all-reduces and gathers of tensor parallelism inside: NCCL can be captured, gloo, which computes
on the host, cannot. All ranks of a model capture the same graphs in the same order, most before the first request and
later ones in the step that needs them, and all of them drop their graphs at the same commands. Otherwise one rank would
wait in a collective operation of a capture that the others never enter.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_layer import MoELayer

from megatron_ext.config import BatchingConfig, ParallelConfig
from megatron_ext.errors import ConfigError
from megatron_ext.mcore import platform
from megatron_ext.mcore.context import InferenceContext
from megatron_ext.mcore.controller import InferenceController
from megatron_ext.mcore.layers.dense_moe import why_not_dense
from megatron_ext.ops import cpp
from megatron_ext.ops.backends import AUTO
from megatron_ext.ops.linear import onednn
from megatron_ext.runner.cuda_graphs.buckets import Buckets
from megatron_ext.runner.cuda_graphs.cuda_graph_runner import CudaGraphRunner
from megatron_ext.runner.cuda_graphs.graph_capture import Capture, CudaGraphs
from megatron_ext.runner.recorded_steps import RecordedSteps

OLDEST_NCCL = (2, 9, 6)
"""Oldest version of NCCL whose operations torch captures."""
BLOCKING_WAIT = ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT")
"""Variables that make torch's waits for NCCL block the host, which a capture does not allow."""
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Communication:
    """Communication between the ranks that share a model.

    Attributes:
        sizes: Sizes of the groups.
        backend: Backend of the group of tensor parallelism.
        nccl: Version of NCCL; None without it.
        blocks: Variable of the environment that makes waits block; None if none does.
    """

    sizes: ParallelConfig
    backend: str
    nccl: tuple[int, ...] | None
    blocks: str | None

    @classmethod
    def here(cls, device: torch.device) -> Communication:
        """Return how this rank communicates in Megatron's process groups."""
        backend = torch.distributed.get_backend(parallel_state.get_tensor_model_parallel_group())
        has_nccl = device.type == "cuda" and torch.distributed.is_nccl_available()
        version = torch.cuda.nccl.version() if has_nccl else None
        blocks = next((name for name in BLOCKING_WAIT if os.environ.get(name, "0") not in ("", "0")), None)
        return cls(platform.group_sizes(), str(backend), version, blocks)


def check_ranks(batching: BatchingConfig, communication: Communication, device: torch.device) -> None:
    """Check that the ranks of a model can capture their messages, before anything is allocated.

    On a CPU the same steps run uncaptured, over any backend.

    Raises:
        ConfigError: They cannot.
    """
    sizes = communication.sizes
    if not batching.has_input_buffers or device.type != "cuda" or why_not_captured(sizes) is not None:
        return
    problem = _problem_of_nccl(communication) if sizes.tensor_model_parallel_size > 1 else None
    if problem is not None:
        raise ConfigError(f"--cuda-graph-impl {batching.cuda_graph_impl}: {problem}, or --cuda-graph-impl none")


def why_not_captured(sizes: ParallelConfig) -> str | None:
    """Return why steps at these sizes are not captured; None if they are. Launch scripts of Megatron ask for both."""
    if sizes.pipeline_model_parallel_size > 1:
        return (
            f"--pipeline-model-parallel-size {sizes.pipeline_model_parallel_size} sends hidden states between stages, "
            "which is not captured (--tensor-model-parallel-size is)"
        )
    if sizes.expert_model_parallel_size > 1:
        return (
            f"--expert-model-parallel-size {sizes.expert_model_parallel_size} sends as many tokens to each rank as "
            "the router says, which no graph can (--expert-tensor-parallel-size is captured)"
        )
    return None


def _problem_of_nccl(communication: Communication) -> str | None:
    if "nccl" not in communication.backend:
        return f"messages of {communication.backend} cannot be captured; give --distributed-backend nccl"
    if communication.nccl is None or communication.nccl < OLDEST_NCCL:
        found, oldest = (".".join(map(str, one)) for one in (communication.nccl or (0,), OLDEST_NCCL))
        return f"NCCL {found} cannot be captured; install {oldest} or newer"
    if communication.blocks is not None:
        return f"{communication.blocks} makes the host wait for messages, which cannot be captured; unset it"
    return None


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
    problem = (why_not_captured(platform.group_sizes()) if has_peers else None) or _problem(controller)
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
    graphs = CudaGraphs(rules.device) if is_cuda else Capture()
    return CudaGraphRunner(controller, context.plan, rules, buckets, graphs, has_peers=has_peers)


def _problem(controller: InferenceController) -> str | None:
    if controller.records_routing:
        return "--moe-enable-routing-replay reads the experts of each token after a step"
    model = controller.inference_wrapped_model.model
    problems = (why_not_dense(module.experts) for module in model.modules() if isinstance(module, MoELayer))
    return next((one for one in problems if one is not None), None)


def recorded_steps_for(
    context: InferenceContext, controller: InferenceController, batching: BatchingConfig, *, is_alone: bool
) -> RecordedSteps | None:
    """Return the recorded steps of an engine; None if its decode steps are to run the model's Python code.

    They need the operators in C++ and one process. Captured steps replace them, and experts of MoE layers get as many
    tokens as the router sends, which Python reads.

    Args:
        context: Context whose plan was made with the same settings.
        controller: Controller around the model.
        batching: Settings.
        is_alone: Whether there are no other ranks.
    """
    model, rules = controller.inference_wrapped_model.model, context.staging_rules
    if batching.has_input_buffers or not is_alone or rules.device.type != "cpu":
        return None
    if batching.operator_backend not in (AUTO, onednn.NAME) or not cpp.are_used():
        return None
    if any(isinstance(module, MoELayer) for module in model.modules()):
        return None
    return RecordedSteps(model, rules)
