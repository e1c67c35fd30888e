"""`MegatronAsyncLLM`: Megatron's interface for event loops."""

from __future__ import annotations

import asyncio
from types import TracebackType

from megatron.core.inference.sampling_params import SamplingParams

from megatron_ext.apis.generation import listed
from megatron_ext.apis.llm_base import MegatronLLMBase
from megatron_ext.apis.serve_config import ServeConfig
from megatron_ext.mcore.inference_request import DynamicInferenceRequest


class MegatronAsyncLLM(MegatronLLMBase):
    """Engine around a model in memory, with coroutines, which may run in any event loops; see `MegatronLLMBase`.

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

        Args:
            prompts: A text, a list of token ids, or a list of those.
            sampling_params: Parameters of all prompts; Megatron's defaults if missing.
            multi_modal_data: Must be None.

        Returns:
            The request of a single prompt; for a list of prompts the list of their requests, in order.

        Raises:
            RuntimeError: This rank takes no requests.
            TypeError: `prompts` is neither a prompt nor a list of prompts.
            ConfigError: A prompt or a parameter is invalid. None of the prompts is served.
            EngineSuspended: The engine is suspended, and its memory is freed.
            EngineClosed: The engine has been shut down.
        """
        self._check_primary(multi_modal_data)
        several, is_list = listed(prompts)
        if not several:
            return []
        generation = await asyncio.to_thread(self._begin, several, sampling_params)
        results = await generation.wait_in_loop()
        return results if is_list else results[0]

    async def pause(self) -> None:
        """Stop stepping: requests wait with their memory, and new ones queue up.

        Raises:
            RuntimeError: After `shutdown`.
        """
        await asyncio.to_thread(self._lifecycle.pause)

    async def unpause(self) -> None:
        """Continue to step.

        Raises:
            RuntimeError: After `shutdown`, or while the engine is suspended.
        """
        await asyncio.to_thread(self._lifecycle.unpause)

    async def suspend(self) -> None:
        """Free the pools of a paused engine; its requests compute lost keys, values and states again.

        Raises:
            RuntimeError: After `shutdown`, or if the engine is not paused.
        """
        await asyncio.to_thread(self._lifecycle.suspend)

    async def resume(self) -> None:
        """Allocate the pools again; the engine stays paused until `unpause`.

        Raises:
            RuntimeError: After `shutdown`.
        """
        await asyncio.to_thread(self._lifecycle.resume)

    async def serve(self, serve_config: ServeConfig, *, blocking: bool = True) -> None:
        """Start an OpenAI-compatible HTTP server on the primary rank.

        Args:
            serve_config: Address and options.
            blocking: Whether to wait for `shutdown`; otherwise return when the server listens.

        Raises:
            ValueError: The address cannot be bound, or an option is not supported.
            RuntimeError: There is a server already, or after `shutdown`.
        """
        await asyncio.to_thread(self._serve, serve_config)
        if blocking:
            await self.wait_for_shutdown()

    async def shutdown(self) -> None:
        """Stop the server and the engine, and free all resources. Further calls do nothing."""
        await asyncio.to_thread(self._close)

    async def wait_for_shutdown(self) -> None:
        """Wait for the end of the engine.

        Raises:
            RankError: Another rank has failed.
        """
        if self._ended is not None:
            await asyncio.shield(asyncio.wrap_future(self._ended))

    async def __aenter__(self) -> MegatronAsyncLLM:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.shutdown()
