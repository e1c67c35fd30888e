"""Loaded engine for use as a library, from any thread and in any event loop, and its part on other ranks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from functools import partial as partial_call
from types import TracebackType
from typing import TypeVar, overload

from megatron_ext.api.prompt_input import ParamsForAll, Prompt, PromptReader, Prompts
from megatron_ext.api.stream import RequestStream
from megatron_ext.config import ModelConfig, RequestParams
from megatron_ext.config.in_flight import InFlight, check_version
from megatron_ext.engine.client import EngineClient
from megatron_ext.engine.client_request import EngineRequest
from megatron_ext.engine.pausing import PauseMode
from megatron_ext.engine.statistics import EngineStatistics
from megatron_ext.errors import ConfigError, EngineClosed, WeightUpdateError
from megatron_ext.mcore.adapter import InferenceEngine
from megatron_ext.models.llm_engine import LLMEngine
from megatron_ext.models.update.naming import NamedTensors
from megatron_ext.models.update.shards import ShardOptions
from megatron_ext.models.update.writer import WeightWriter
from megatron_ext.parallel.commands import Action
from megatron_ext.parallel.worker import Worker
from megatron_ext.scheduling.record import RequestRecord

Result = TypeVar("Result")
Own = TypeVar("Own", bound="LoadedEngine")


def serve(client: EngineClient, requests: Sequence[EngineRequest]) -> list[RequestRecord]:
    """Serve requests to completion, and return their records in order; raises the errors of `LoadedEngine.generate`."""
    submitted = client.submit(requests)
    try:
        submitted.result()
        return [request.record.result() for request in requests]
    except BaseException:  # Ctrl-C, too
        client.abort(requests)
        raise


async def serve_async(client: EngineClient, requests: Sequence[EngineRequest]) -> list[RequestRecord]:
    """Serve requests as `serve`, without blocking the event loop; they are aborted if the task is cancelled."""
    submitted = client.submit(requests)
    try:
        await asyncio.wrap_future(submitted)
        return [await asyncio.wrap_future(request.record) for request in requests]
    except BaseException:
        client.abort(requests)
        raise


class LoadedEngine(LLMEngine):
    """Model and engine, as `load_engine` returns them; the engine steps in a thread of its own.

    Every method may be called from any thread. `generate_async` and `stream` may run in any event loops, many at once.
    The others wait for the step in flight, and would block an event loop for as long.

    Args:
        engine: Engine of the model; no other code may call it from now on.
        weight_writer: Model, and writer of new weights.
        defaults: Parameters of requests without `RequestParams`.
        on_close: Called once, after the engine has been closed.

    Attributes:
        model_config: Architecture of the model.
        model_name: Name of the model: the checkpoint's directory as given, "embedded", or "random weights, <pattern>".
    """

    def __init__(
        self,
        engine: InferenceEngine,
        weight_writer: WeightWriter,
        defaults: RequestParams,
        on_close: Callable[[], None],
    ) -> None:
        super().__init__(engine, weight_writer, on_close=on_close)
        self._reader = PromptReader(self.tokenizer, self.vocabulary, self.grammars, defaults)
        self.model_config: ModelConfig = weight_writer.loaded.config
        self.model_name: str = weight_writer.loaded.name

    # Requests

    @overload
    def generate(self, prompts: Prompt, params: RequestParams | None = None) -> list[RequestRecord]: ...

    @overload
    def generate(self, prompts: Iterable[Prompt], params: ParamsForAll = None) -> list[RequestRecord]: ...

    def generate(self, prompts: Prompts, params: ParamsForAll = None) -> list[RequestRecord]:
        """Serve prompts to completion.

        >>> records = engine.generate(["The import statement", "A list is"], RequestParams(num_tokens_to_generate=8))
        >>> [len(record.generated_tokens) for record in records]
        [8, 8]
        >>> (record,) = engine.generate("The import statement", RequestParams(num_tokens_to_generate=8))
        >>> record.generated_text == records[0].generated_text
        True

        Args:
            prompts: A text, token ids (a list, a tensor or an array of integers), or the record of a request that ended
                early, whose output is continued; or several of those in any mixture.
            params: Parameters of all prompts, or one for each; None for the engine's defaults, or a record's own.

        Returns:
            A record for each prompt, in their order. A prompt that can never be served, such as one longer than the
            model's maximum, is `FAILED` with the reason in `error`; the others are not affected.

        Raises:
            ConfigError: A prompt or its parameters are invalid. None of the prompts is served.
            EngineSuspended: The engine is suspended. None of the prompts is served.
            EngineClosed: The engine is closed, or was closed meanwhile.
            SilentWeightChange: Weights of an attached model were written without a trace, see `attach_engine`. None of
                the prompts is served.
        """
        return serve(self.client, [EngineRequest(one) for one in self._reader.read_all(prompts, params)])

    async def generate_async(self, prompt: Prompt, params: RequestParams | None = None) -> RequestRecord:
        """Serve one prompt to completion; the request is aborted if the task is cancelled.

        >>> async def both():
        ...     return await asyncio.gather(engine.generate_async("A list is"), engine.generate_async([5, 6, 7]))
        >>> [record.status.name for record in asyncio.run(both())]
        ['COMPLETED', 'COMPLETED']

        Takes the arguments of `generate`, for one prompt, and raises its errors.
        """
        (record,) = await serve_async(self.client, [await asyncio.to_thread(self._one, prompt, params)])
        return record

    def stream(self, prompt: Prompt, params: RequestParams | None = None) -> RequestStream:
        """Stream the output of one prompt; the request is aborted if the loop is left or its task is cancelled.

        >>> async def show():
        ...     async for part in engine.stream("A list is", RequestParams(num_tokens_to_generate=8)):
        ...         print(part.tokens, repr(part.text))
        >>> asyncio.run(show())
        (264,) ' a'
        (493,) ' list'
        ...

        Returns:
            The parts; see `StreamPart`. The request begins when the first one is read. Reading raises the errors of
            `generate`, and `RequestFailed` if the request fails.
        """
        return RequestStream(lambda: self._one(prompt, params), self.client, self.vocabulary)

    def _one(self, prompt: Prompt, params: RequestParams | None) -> EngineRequest:
        return EngineRequest(self._reader.read_one(prompt, params))

    # Inspection

    def statistics(self) -> EngineStatistics:
        """Return current usage and counts; `statistics().prefix_cache()` has the cache's numbers by name."""
        return self._call(self._core.statistics)

    # Weights and memory

    def update_weights(
        self,
        named_tensors: NamedTensors,
        *,
        partial: bool = False,
        in_flight: str = "recompute",
        weights_version: int | None = None,
        keep_old: bool = False,
    ) -> None:
        """Write new weights in place, all or nothing, between two steps; the cache is emptied.

        Names follow the format that the model was loaded from: a Hugging Face checkpoint, the parameters of Megatron's
        model, or this package; `weight_shapes` lists them. Values are rounded to the types of the parameters, and may
        be on any device.

        >>> new = {name: torch.zeros(shape) for name, shape in engine.weight_shapes().items()}
        >>> with load_engine(buffer_size_gb=0.1) as other:
        ...     other.update_weights(new)
        ...     (record,) = other.generate("A list is", RequestParams(num_tokens_to_generate=3, ignore_eos=True))
        >>> record.generated_tokens
        (0, 0, 0)

        Each record has the versions of the weights that made its tokens (docs/rl.md). Tensors are converted and moved
        one by one: the largest bounds the additional memory.

        Args:
            named_tensors: A dict, or pairs of name and tensor, such as `model.named_parameters()`.
            partial: Whether tensors may be missing; these stay unchanged.
            in_flight: "recompute": requests in flight keep their tokens, and compute keys, values and states again
                with the new weights before the next one; "finish": they end first, and requests that come meanwhile
                wait; "abort": they end as `ABORTED`, with the tokens that they have; "continue": they go on with the
                keys, values and states of the old weights, which are not cached.
            weights_version: Number of the new weights in records; one more than the last one's if missing.
            keep_old: Whether to copy the old weights first, so that a failure restores them.

        Raises:
            ConfigError: A name is unknown or missing, or a shape or type differs; names the tensor. Nothing has been
                written, and no request has ended.
            WeightUpdateError: A write has failed. Without `keep_old` all requests end as `FAILED`, and none is taken
                until a complete update succeeds.
        """
        chosen = InFlight.read(in_flight)
        self.weight_writer.names()  # refuses a model of the caller's before requests are waited for
        check_version(weights_version)
        write = partial_call(self.weight_writer.write, named_tensors, partial=partial, keep_old=keep_old)
        self.change_weights(write, chosen, weights_version, is_complete=not partial).result()

    def update_weights_from_shards(
        self,
        named_shards: NamedTensors,
        *,
        partial: bool = False,
        in_flight: str = "recompute",
        weights_version: int | None = None,
        keep_old: bool = False,
    ) -> None:
        """Write the shards of new weights that each rank has; the programs of all ranks call this together.

        The other ranks call it on their `EngineFollower`, with the same options; see `update_weights`.
        Each rank gives its own part of each parameter; nothing is sent to other ranks (docs/rl.md).

        Args:
            named_shards: Local tensors, by the names of Megatron's model on this rank, such as `model.state_dict()`.

        Raises:
            ConfigError: A name, shape, type or layout does not fit, or options differ; names the rank. No rank has
                written anything.
            WeightUpdateError: See `update_weights`.
        """
        if not self.weight_writer.shards_are_handed_over:
            raise ConfigError(
                "the other ranks are in follow_engine, and hand over no shards; call load_follower on them instead, or "
                "give whole tensors to update_weights"
            )
        options = ShardOptions(partial, in_flight, weights_version, keep_old)
        write = partial_call(self.weight_writer.write_shards, named_shards, options)
        # All ranks together refuse another name.
        chosen = next((one for one in InFlight if one == in_flight), InFlight.RECOMPUTE)
        self.change_weights(write, chosen, weights_version, is_complete=not partial, are_shards=True).result()

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor that `update_weights` takes, by name."""
        return self._call(self.weight_writer.shapes)

    def weights_changed(self, *, in_flight: str = "recompute", weights_version: int | None = None) -> None:
        """Empty the cache after other code has written the model's weights in place.

        Args:
            in_flight: See `update_weights`; but requests cannot finish with weights that are gone.
            weights_version: See `update_weights`.

        Raises:
            ConfigError: An argument is invalid.
        """
        chosen = InFlight.read(in_flight, is_written=True)
        check_version(weights_version)
        self._call(self._core.weights_changed, chosen, weights_version)

    def pause_generation(self, max_seconds: float | None = None, mode: PauseMode = "keep") -> int:
        """Stop stepping at the end of a step, and wait until the device is idle; new requests queue up.

        Args:
            max_seconds: Maximum duration in seconds, after which generation resumes by itself, with a log line; None
                for no limit. Another pause begins it anew.
            mode: "keep": requests keep their memory and continue when generation is resumed. "abort": they end as
                ABORTED with the finish reason "abort", and their records have the tokens and log-probs so far;
                `generate(record)` continues one.

        Returns:
            Number of requests that ended.

        Raises:
            ConfigError: `max_seconds` is not positive, or too large; or there is no such mode.
        """
        return self.client.pause(max_seconds, mode)

    def resume_generation(self) -> None:
        """Continue to step after `pause_generation`; does nothing if generation is not paused."""
        self.client.unpause()

    @property
    def is_paused(self) -> bool:
        """True from `pause_generation` until generation is resumed."""
        return self.client.pausing is not None

    # Shutdown

    def __enter__(self: Own) -> Own:
        """Return the engine itself, which is closed when the block ends."""
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AttachedEngine(LoadedEngine):
    """Engine around a caller's model on the first rank; see `LoadedEngine`.

    `suspend` frees the pools, and the `follow()` of the other ranks returns; after `resume` they call it again.
    """


class EngineFollower:
    """Part of an engine on a rank other than the first, as `attach_engine` and `load_follower` return it.

    Args:
        worker: Repeats the steps of the first rank.
        on_close: Called once, at the end.
    """

    def __init__(self, worker: Worker, weight_writer: WeightWriter, on_close: Callable[[], None]) -> None:
        self._worker = worker
        self._weight_writer = weight_writer
        self._on_close = on_close
        self._is_closed = False
        self._is_awaited = False  # the first rank waits for this one's shards

    @property
    def is_closed(self) -> bool:
        """True if the first rank or this one has closed the engine."""
        return self._is_closed

    def follow(self) -> None:
        """Take part in the steps until the first rank suspends or closes the engine, or updates weights from shards.

        Raises:
            EngineClosed: The engine is closed.
            ConfigError: The first rank waits for this rank's shards.
            RankError: A rank has failed or does not answer.
        """
        if self._is_closed:
            raise EngineClosed("the engine is closed; attach or load a new one")
        if self._is_awaited:
            raise ConfigError(
                "the first rank is in update_weights_from_shards, and waits for this rank's; call it here, too"
            )
        action = self._worker.follow()
        self._is_awaited = action is Action.HAND_OVER
        if action is Action.STOP:
            self._free()

    def update_weights_from_shards(
        self,
        named_shards: NamedTensors,
        *,
        partial: bool = False,
        in_flight: str = "recompute",
        weights_version: int | None = None,
        keep_old: bool = False,
    ) -> None:
        """Write this rank's shards of new weights, in the call that all ranks make together.

        Before that this rank takes part in the steps until the first one updates its weights. See
        `LoadedEngine.update_weights_from_shards` for arguments and errors.

        Raises:
            EngineClosed: The engine is closed.
        """
        while not self._is_awaited:
            self.follow()
            if self._is_closed:
                raise EngineClosed("the first rank has closed the engine; attach or load a new one")
        self._is_awaited = False
        options = ShardOptions(partial, in_flight, weights_version, keep_old)
        try:
            self._weight_writer.write_shards(named_shards, options)
        except (ConfigError, WeightUpdateError):
            self._worker.follow()
            raise
        self._worker.follow()

    def close(self) -> None:
        """Free this rank's resources, after the first rank has suspended or closed the engine; then do nothing.

        Raises:
            RankError: A rank has failed or does not answer.
        """
        if not self._is_closed and not self._worker.is_suspended:
            self.follow()
        self._free()

    def _free(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._worker.free()
            self._on_close()

    def __enter__(self) -> EngineFollower:
        """Return the object itself, which is closed when the block ends; after an error without waiting."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._free()
