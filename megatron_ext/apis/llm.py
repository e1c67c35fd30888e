"""`MegatronLLM` and `MegatronAsyncLLM`: Megatron's interfaces, the blocking one and the one for event loops."""

from __future__ import annotations

import asyncio
import logging
import threading
import weakref
from collections.abc import Coroutine
from concurrent.futures import Future
from types import TracebackType
from typing import TypeVar

import torch
import torch.distributed as dist
from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import GPTInferenceWrapper
from megatron.core.inference.sampling_params import SamplingParams
from torch import nn

import megatron_ext
from megatron_ext.api.engine import EngineFollower, LoadedEngine
from megatron_ext.apis.http_frontend import ServeConfig
from megatron_ext.apis.inference_config import EngineOptions, read_inference_config
from megatron_ext.apis.ranks import DirectCalls, FollowingRuntime
from megatron_ext.apis.runtime import ContextView, ControllerView, EngineRuntime, EngineView, Prompt, listed
from megatron_ext.apis.state_log import PAUSE, RESUME, SUSPEND, UNPAUSE, Change, StateLog
from megatron_ext.errors import ConfigError, EngineClosed
from megatron_ext.mcore import platform
from megatron_ext.mcore.inference_request import DynamicInferenceRequest
from megatron_ext.text.tokenizer import Tokenizer

Result = TypeVar("Result")

logger = logging.getLogger(__name__)


class MegatronLLMBase:
    """Model in memory with an engine; every rank constructs the same object.

    In direct mode (without a coordinator) the methods of the lifecycle raise `RuntimeError`, and after `shutdown` all
    others but `shutdown` and `wait_for_shutdown` raise `EngineClosed`, a `RuntimeError`.

    Args:
        model: Model of Megatron, in eval mode.
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
        attached = megatron_ext.attach_engine(model, tokenizer, **options.settings_for(model))
        self._runtime = _start(attached, options, tokenizer)
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

    def _generate(self, prompts: list[Prompt], params: SamplingParams | None) -> list[DynamicInferenceRequest]:
        """Serve prompts, in direct mode together with the other ranks."""
        params = SamplingParams() if params is None else params
        serve = self._runtime.generate if isinstance(self._runtime, EngineRuntime) else None
        if self._direct_calls is not None:
            return self._direct_calls.generate(prompts, params, serve)
        assert serve is not None, "this rank takes requests"
        return serve(prompts, params)

    def _check_primary(self, multi_modal_data: object) -> None:
        if multi_modal_data is not None:
            raise ConfigError("multi_modal_data: prompts are text; leave it out")
        if not self.is_primary_rank:
            raise RuntimeError("generate() is for the primary rank in coordinator mode; ask is_primary_rank first")

    def _change(self, change: Change) -> None:
        self._check_coordinator()
        self._runtime.change(change)

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


class MegatronLLM(MegatronLLMBase):
    """Engine around a model in memory, with blocking methods, which any thread may call; see `MegatronLLMBase`.

    Its methods also work inside a running event loop, which they block.
    """

    def generate(
        self,
        prompts: str | list[int] | list[str] | list[list[int]],
        sampling_params: SamplingParams | None = None,
        multi_modal_data: object = None,
    ) -> list[DynamicInferenceRequest]:
        """Serve one prompt or several; return their requests in order, always in a list.

        Args:
            prompts: A text, a list of token ids, or a list of those.
            sampling_params: Parameters of all prompts; Megatron's defaults if missing.
            multi_modal_data: Must be None.

        Raises:
            RuntimeError: This rank takes no requests.
            TypeError: `prompts` is neither a prompt nor a list of prompts.
            ConfigError: A prompt or a parameter is invalid. None of the prompts is served.
            EngineSuspended: The engine is suspended, and its memory is freed.
            EngineClosed: The engine has been shut down.
        """
        self._check_primary(multi_modal_data)
        return self._generate(listed(prompts)[0], sampling_params)

    def pause(self) -> None:
        """Stop stepping: requests wait with their memory, and new ones queue up."""
        self._change(PAUSE)

    def unpause(self) -> None:
        """Continue to step.

        Raises:
            RuntimeError: The engine is suspended.
        """
        self._change(UNPAUSE)

    def suspend(self) -> None:
        """Free the pools of a paused engine; its requests compute lost keys, values and states again.

        Raises:
            RuntimeError: The engine is not paused.
        """
        self._change(SUSPEND)

    def resume(self) -> None:
        """Allocate the pools again; the engine stays paused until `unpause`."""
        self._change(RESUME)

    def serve(self, serve_config: ServeConfig, *, blocking: bool = True) -> None:
        """Start an OpenAI-compatible HTTP server on the primary rank.

        Args:
            blocking: Whether to wait for `shutdown`; otherwise return when the server listens.

        Raises:
            ValueError: In direct mode; or the address cannot be bound, or an option is not supported.
            RuntimeError: There is a server already.
        """
        self._serve(serve_config)
        if blocking:
            self.wait_for_shutdown()

    def shutdown(self) -> None:
        """Stop the server and the engine, and free all resources. Further calls do nothing."""
        self._close()

    def wait_for_shutdown(self) -> None:
        """Wait for the end of the engine; returns at once in direct mode.

        Raises:
            RankError: Another rank has failed.
        """
        if self._ended is not None:
            self._ended.result()

    def __enter__(self) -> MegatronLLM:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.shutdown()


class MegatronAsyncLLM(MegatronLLMBase):
    """Engine around a model in memory, with coroutines, which may run in any event loops; see `MegatronLLMBase`.

    The coroutines do what the methods of `MegatronLLM` do, and raise the same errors; there is no direct mode.

    Raises:
        ValueError: `use_coordinator` is False, as in Megatron.
    """

    _needs_coordinator = True

    async def generate(
        self,
        prompts: str | list[int] | list[str] | list[list[int]],
        sampling_params: SamplingParams | None = None,
        multi_modal_data: object = None,
    ) -> DynamicInferenceRequest | list[DynamicInferenceRequest]:
        """Serve one prompt or several; requests in flight are aborted if the task is cancelled.

        Returns:
            The request of a single prompt; for a list of prompts the list of their requests, in order.
        """
        self._check_primary(multi_modal_data)
        several, is_list = listed(prompts)
        assert isinstance(self._runtime, EngineRuntime), "this rank takes requests"
        params = SamplingParams() if sampling_params is None else sampling_params
        results = await self._runtime.generate_async(several, params)
        return results if is_list else results[0]

    async def pause(self) -> None:
        """Stop stepping: requests wait with their memory, and new ones queue up."""
        await asyncio.to_thread(self._change, PAUSE)

    async def unpause(self) -> None:
        """Continue to step."""
        await asyncio.to_thread(self._change, UNPAUSE)

    async def suspend(self) -> None:
        """Free the pools of a paused engine."""
        await asyncio.to_thread(self._change, SUSPEND)

    async def resume(self) -> None:
        """Allocate the pools again; the engine stays paused until `unpause`."""
        await asyncio.to_thread(self._change, RESUME)

    async def serve(self, serve_config: ServeConfig, *, blocking: bool = True) -> None:
        """Start an OpenAI-compatible HTTP server on the primary rank."""
        await asyncio.to_thread(self._serve, serve_config)
        if blocking:
            await self.wait_for_shutdown()

    async def shutdown(self) -> None:
        """Stop the server and the engine, and free all resources. Further calls do nothing."""
        await asyncio.to_thread(self._close)

    async def wait_for_shutdown(self) -> None:
        """Wait for the end of the engine."""
        if self._ended is not None:
            await asyncio.shield(asyncio.wrap_future(self._ended))

    async def __aenter__(self) -> MegatronAsyncLLM:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.shutdown()


class BackgroundLoop:
    """Event loop that the first coroutine starts; all methods may be called from any thread."""

    def __init__(self) -> None:
        self._changing = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, args=(platform.device(),), name="coroutines", daemon=True)
        self._is_closed = False

    def submit(self, coroutine: Coroutine[object, object, Result]) -> Future[Result]:
        """Schedule a coroutine.

        Raises:
            EngineClosed: The loop is closed.
        """
        with self._changing:
            if self._is_closed:
                coroutine.close()
                raise EngineClosed("the engine has been shut down; make a new one")
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread.start()
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run_sync(self, coroutine: Coroutine[object, object, Result]) -> Result:
        """Schedule a coroutine, and wait for its result.

        Raises:
            EngineClosed: The loop is closed.
            RuntimeError: Called by a coroutine of this loop, which could never go on.
        """
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise RuntimeError("run_sync() in a coroutine of its own loop would wait forever; await it instead")
        return self.submit(coroutine).result()

    def close(self) -> None:
        """Cancel all coroutines, and end the thread; does nothing if that was done."""
        with self._changing:
            self._is_closed = True
            if self._loop is None:
                return
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._loop.stop)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self, device: torch.device) -> None:
        loop = self._loop
        assert loop is not None, "set before the start"
        if device.type == "cuda":  # otherwise a thread has the first one
            torch.cuda.set_device(device)
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
        finally:
            tasks = asyncio.all_tasks(loop)
            for task in tasks:
                task.cancel()
            loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            loop.close()
