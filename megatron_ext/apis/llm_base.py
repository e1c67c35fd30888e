"""Shared parts of `MegatronLLM` and `MegatronAsyncLLM`: construction, checks, and the lifecycle."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar

import torch.distributed as dist
from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import GPTInferenceWrapper
from megatron.core.inference.sampling_params import SamplingParams
from torch import nn

import megatron_ext
from megatron_ext.api.engine import LoadedEngine
from megatron_ext.apis.background_loop import BackgroundLoop
from megatron_ext.apis.direct import DirectCalls
from megatron_ext.apis.following import FollowingRuntime
from megatron_ext.apis.generation import Generation, Prompt
from megatron_ext.apis.inference_config import EngineOptions, read_inference_config
from megatron_ext.apis.runtime import EngineRuntime
from megatron_ext.apis.serve_config import ServeConfig
from megatron_ext.apis.state_log import StateLog
from megatron_ext.apis.views import ContextView, ControllerView, EngineView
from megatron_ext.errors import ConfigError
from megatron_ext.mcore.inference_request import DynamicInferenceRequest
from megatron_ext.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from megatron_ext.api.engine import EngineFollower

Result = TypeVar("Result")

logger = logging.getLogger(__name__)


class MegatronLLMBase:
    """Model in memory with an engine; every rank constructs the same object.

    Args:
        model: Model of Megatron, in eval mode.
        tokenizer: Tokenizer of the model.
        inference_config: `InferenceConfig` of megatron-core; None for this package's own defaults.
        use_coordinator: Whether the first rank alone takes requests, and the engine has a lifecycle. Otherwise every
            rank calls `generate` with the same prompts, and has the results.
        coordinator_host: Address of Megatron's coordinator, which this engine does not need; has no effect.
        coordinator_port: Port of that address; has no effect either.
        inference_wrapper_cls: None or Megatron's `GPTInferenceWrapper`.

    Raises:
        ConfigError: An argument is not supported.
        ValueError: Arguments contradict each other.
    """

    _needs_coordinator = False

    def __init__(
        self,
        *,
        model: nn.Module,
        tokenizer: Tokenizer,
        inference_config: object = None,
        use_coordinator: bool = True,
        coordinator_host: str | None = None,
        coordinator_port: int | None = None,
        inference_wrapper_cls: type | None = None,
    ) -> None:
        if self._needs_coordinator and not use_coordinator:
            raise ValueError(f"{type(self).__name__} needs use_coordinator=True; use MegatronLLM for direct mode")
        _check_coordinator(use_coordinator, coordinator_host, coordinator_port)
        if inference_wrapper_cls not in (None, GPTInferenceWrapper):
            raise ConfigError(f"inference_wrapper_cls {inference_wrapper_cls!r}: the engine has its own; leave it out")
        options = read_inference_config(inference_config)
        self._use_coordinator = use_coordinator
        self._loop = BackgroundLoop()
        self._runtime = _start(_attach(model, tokenizer, options), options, tokenizer)
        try:
            is_direct_world = not use_coordinator and dist.get_world_size() > 1
            self._direct_calls = DirectCalls() if is_direct_world else None
        except BaseException:
            self._runtime.close()
            raise
        if isinstance(self._runtime, EngineRuntime):  # the other ranks end with it
            weakref.finalize(self, _close_lost, self._runtime, self._loop).atexit = False

    @property
    def is_primary_rank(self) -> bool:
        """True if this rank may call `generate`."""
        return not self._use_coordinator or isinstance(self._runtime, EngineRuntime)

    @property
    def engine(self) -> EngineView:
        """Counts of the engine, under the names of `DynamicInferenceEngine`."""
        return self._runtime.engine

    @property
    def context(self) -> ContextView:
        """Limits and counts, under the names of `DynamicInferenceContext`."""
        return self._runtime.engine.context

    @property
    def controller(self) -> ControllerView:
        """Tokenizer, under the names of `TextGenerationController`."""
        return self._runtime.engine.controller

    def submit(self, coro: Coroutine[object, object, Result]) -> Future[Result]:
        """Schedule a coroutine in an event loop of the engine, in a thread of its own; callable from any thread.

        `shutdown` cancels the coroutines that have not ended.

        Raises:
            RuntimeError: In direct mode, or after `shutdown`.
        """
        self._check_coordinator(coro)
        return self._loop.submit(coro)

    def run_sync(self, coro: Coroutine[object, object, Result]) -> Result:
        """Schedule a coroutine as `submit`, and wait for its result.

        Raises:
            RuntimeError: In direct mode, after `shutdown`, or in a coroutine of that loop.
        """
        self._check_coordinator(coro)
        return self._loop.run_sync(coro)

    def _close(self) -> None:
        """Stop the server and the engine, and cancel the coroutines of `submit`."""
        try:
            self._runtime.close()
        finally:
            self._loop.close()

    def _begin(self, prompts: list[Prompt], params: SamplingParams | None) -> Generation:
        assert isinstance(self._runtime, EngineRuntime), "this rank takes requests"
        return self._runtime.begin(prompts, SamplingParams() if params is None else params)

    def _generate(self, prompts: list[Prompt], params: SamplingParams | None) -> list[DynamicInferenceRequest]:
        """Serve prompts, in direct mode together with the other ranks."""
        if self._direct_calls is None:
            return self._begin(prompts, params).wait() if prompts else []
        serve = self._runtime.generate if isinstance(self._runtime, EngineRuntime) else None
        return self._direct_calls.generate(prompts, SamplingParams() if params is None else params, serve)

    def _check_primary(self, multi_modal_data: object) -> None:
        if multi_modal_data is not None:
            raise ConfigError("multi_modal_data: prompts are text; leave it out")
        if not self.is_primary_rank:
            raise RuntimeError("generate() is for the primary rank in coordinator mode; ask is_primary_rank first")

    @property
    def _lifecycle(self) -> EngineRuntime | FollowingRuntime:
        """Runtime, if its engine has a lifecycle.

        Raises:
            RuntimeError: The mode is direct.
        """
        self._check_coordinator()
        return self._runtime

    def _check_coordinator(self, unused: Coroutine[object, object, object] | None = None) -> None:
        if not self._use_coordinator:
            if unused is not None:
                unused.close()
            raise RuntimeError("this method needs use_coordinator=True")

    def _serve(self, config: ServeConfig) -> None:
        if not self._use_coordinator:
            raise ValueError("serve() needs use_coordinator=True")
        self._runtime.serve(config)

    @property
    def _ended(self) -> Future[None] | None:
        """Future of the end of the engine; None in direct mode, where nothing runs by itself."""
        return self._runtime.ended if self._use_coordinator else None


def _check_coordinator(use_coordinator: bool, host: str | None, port: int | None) -> None:
    """Check the arguments that concern the coordinator, and log once which of them have no effect.

    Raises:
        ValueError: They contradict each other, or the mode does not support the layout of the ranks.
    """
    from megatron.core import parallel_state

    if host is not None or port is not None:
        if not use_coordinator:
            raise ValueError("coordinator_host and coordinator_port need use_coordinator=True")
        logger.info("coordinator_host and coordinator_port have no effect: ranks talk through their process groups")
    if not use_coordinator and parallel_state.model_parallel_is_initialized():
        size = parallel_state.get_expert_model_parallel_world_size()
        if size > 1:
            raise ValueError(f"expert_model_parallel_size {size} needs use_coordinator=True")


def _start(
    attached: LoadedEngine | EngineFollower, options: EngineOptions, tokenizer: Tokenizer
) -> EngineRuntime | FollowingRuntime:
    """Start the runtime of this rank; nothing is left if that fails."""
    log = StateLog() if dist.get_world_size() > 1 else None
    if not isinstance(attached, LoadedEngine):
        assert log is not None, "there is another rank"
        return FollowingRuntime(attached, log, tokenizer)
    try:
        return EngineRuntime(attached, options, tokenizer, log)
    except BaseException:
        attached.close()
        raise


def _close_lost(runtime: EngineRuntime, loop: BackgroundLoop) -> None:
    """Close the runtime of a collected object; in the background if this may be the engine's own thread."""
    loop.close()
    if threading.current_thread() is threading.main_thread():
        runtime.close()
    else:
        threading.Thread(target=runtime.close, name="close").start()


def _attach(model: nn.Module, tokenizer: Tokenizer, options: EngineOptions) -> LoadedEngine | EngineFollower:
    """Return an engine around the model; on other ranks than the first, this rank's part of it."""
    return megatron_ext.attach_engine(model, tokenizer, **options.settings_for(model))
