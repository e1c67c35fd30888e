"""Engine core of rank 0, and the resources of any rank, around a context and a controller."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from megatron_ext.config.routing import RoutingConfig
from megatron_ext.engine.core import EngineCore
from megatron_ext.engine.executor import Executor, ModelResources
from megatron_ext.engine.input_processor import InputSettings
from megatron_ext.mcore.context import InferenceContext
from megatron_ext.mcore.controller import InferenceController
from megatron_ext.mcore.step_executor import StepExecutor
from megatron_ext.mcore.weight_changes import WeightsWatch, mark_weights_changed, samples_of
from megatron_ext.memory.engine_plan import EnginePlan
from megatron_ext.parallel.commands import RecordingScheduler
from megatron_ext.parallel.driver import Driver
from megatron_ext.parallel.parallel_context import ParallelContext
from megatron_ext.scheduling.scheduler import Scheduler
from megatron_ext.speculation.proposals import Proposals
from megatron_ext.text.tokenizer import ends_of, tokenize_prompt, word_tokens


def make_scheduler(plan: EnginePlan) -> Scheduler:
    """Return a scheduler without requests, the same on every rank."""
    return Scheduler(plan.limits, plan.policy, plan.fingerprint, plan.snapshot_slots)


def make_core(
    parallel_context: ParallelContext | None,
    context: InferenceContext,
    controller: InferenceController,
    seed: int,
    logging_interval: int | None = 0,
    routing: RoutingConfig | None = None,
) -> EngineCore:
    """Return the engine core of rank 0.

    Args:
        parallel_context: All ranks; None for a world of one.
        context: Pools and plan.
        controller: Model and tokenizer.
        seed: See `InputSettings`.
        logging_interval: See `StepLog`.
        routing: See `EngineCore`.
    """
    plan = context.plan
    ends, words = ends_of(controller.tokenizer), partial(word_tokens, controller.tokenizer)
    matcher, max_drafts = controller.grammars.matcher, plan.limits.max_drafts

    def tokenize(text: str, add_bos: bool) -> list[int]:
        return tokenize_prompt(controller.tokenizer, text, add_bos=add_bos)

    input_settings = InputSettings(tokenize, controller.vocabulary, ends, seed, words, matcher, max_drafts)
    drafter = controller.drafter
    proposals = None if drafter is None else Proposals(drafter, controller.vocabulary.has_tokens)
    workers, own = None, StepExecutor(context, controller)
    parts: Sequence[tuple[Scheduler, Executor]] = [(make_scheduler(plan), own)]
    if parallel_context is not None:
        settings = plan.limits, plan.policy, plan.fingerprint, plan.snapshot_slots
        schedulers = [RecordingScheduler(*settings) for _ in range(parallel_context.replicas)]
        executors = [parallel_context.executor(replica, own) for replica in range(parallel_context.replicas)]
        parts = list(zip(schedulers, executors, strict=True))
        releases, heartbeat = parallel_context.releases_ranks, parallel_context.heartbeat
        workers = Driver(schedulers, parallel_context.link, heartbeat, releases=releases)
        if controller.leading_drafter is not None:
            controller.leading_drafter.driver = workers
    return EngineCore(
        parts,
        input_settings,
        proposals=proposals,
        workers=workers,
        resources=ContextResources(context, controller),
        logging_interval=logging_interval,
        routing=routing,
    )


class ContextResources(ModelResources):
    """`ModelResources` of a context and its model.

    Args:
        context: Context whose pools are allocated and freed.
        controller: Controller whose model's weights are watched.
    """

    def __init__(self, context: InferenceContext, controller: InferenceController) -> None:
        self._context = context
        self.suspend_level = context.suspend_level
        self._model = controller.inference_wrapped_model.model
        self._packed = controller.packed
        self._weights = WeightsWatch(self._model)
        self._samples = samples_of(self._model)
        self._keeps_contents = False  # of the pools, in host memory and after the return from it

    def has_new_weights(self) -> bool:
        """Return whether weights have changed; see `ModelResources`."""
        if self._context.recorded_steps is not None:
            self._context.recorded_steps.check()  # before the watch, which notices replaced parameters that are freed
        if self._samples is not None:
            self._samples.note_activity()
        has_changed = self._weights.has_changed()
        if has_changed and self._samples is not None:
            self._samples.take()
        return has_changed

    def check_weights(self, *, is_caching: bool) -> None:
        """Compare the samples of an attached model, unless its counters show a change; see `ModelResources`."""
        has_copies = self._packed is not None and self._packed.bytes_held_twice > 0
        is_kept = is_caching or has_copies or self._context.cuda_graph_runner is not None  # results of the weights
        if self._samples is not None and is_kept and self._weights.is_current:
            self._samples.check()

    def mark_new_weights(self) -> None:
        """Mark the weights as changed; see `ModelResources`."""
        mark_weights_changed(self._model)

    def use_new_weights(self) -> None:
        """Tell the context about changed weights; see `ModelResources`."""
        self._context.notice_new_weights()

    def allocate(self) -> None:
        """Allocate the pools; see `ModelResources`."""
        self._context.allocate_all_tensors(is_init=False)
        if self._samples is not None and not self._keeps_contents:  # nothing is cached yet
            self._samples.take()

    def capture(self) -> None:
        """Capture the CUDA graphs; see `ModelResources`. Several ranks do so in the steps that need them."""
        runner = self._context.cuda_graph_runner
        if runner is not None and not runner.has_peers:
            self._context.prepare_cuda_graphs()

    def free(self, *, offloads: bool = False) -> None:
        """Free the pools, and packed copies of weights; see `ModelResources`."""
        self._context.deallocate_all_tensors(offloads=offloads)
        self._keeps_contents = offloads
        if self._packed is not None:
            self._packed.release()

    def bind_thread(self) -> None:
        """Select the model's CUDA device in this thread; see `ModelResources`."""
        device = next(self._model.parameters()).device
        if device.type == "cuda":
            torch.cuda.set_device(device)
