"""`MegatronLLM`: Megatron's blocking interface."""

from __future__ import annotations

from types import TracebackType

from megatron.core.inference.sampling_params import SamplingParams

from megatron_ext.apis.generation import listed
from megatron_ext.apis.llm_base import MegatronLLMBase
from megatron_ext.apis.serve_config import ServeConfig
from megatron_ext.mcore.inference_request import DynamicInferenceRequest


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
        several, _ = listed(prompts)
        return self._generate(several, sampling_params)

    def pause(self) -> None:
        """Stop stepping: requests wait with their memory, and new ones queue up.

        Raises:
            RuntimeError: In direct mode, or after `shutdown`.
        """
        self._lifecycle.pause()

    def unpause(self) -> None:
        """Continue to step.

        Raises:
            RuntimeError: In direct mode, after `shutdown`, or while the engine is suspended.
        """
        self._lifecycle.unpause()

    def suspend(self) -> None:
        """Free the pools of a paused engine; its requests compute lost keys, values and states again.

        Raises:
            RuntimeError: In direct mode, after `shutdown`, or if the engine is not paused.
        """
        self._lifecycle.suspend()

    def resume(self) -> None:
        """Allocate the pools again; the engine stays paused until `unpause`.

        Raises:
            RuntimeError: In direct mode, or after `shutdown`.
        """
        self._lifecycle.resume()

    def serve(self, serve_config: ServeConfig, *, blocking: bool = True) -> None:
        """Start an OpenAI-compatible HTTP server on the primary rank.

        Args:
            serve_config: Address and options.
            blocking: Whether to wait for `shutdown`; otherwise return when the server listens.

        Raises:
            ValueError: In direct mode; or the address cannot be bound, or an option is not supported.
            RuntimeError: There is a server already, or after `shutdown`.
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
