"""Loaded engine for use as a library, from any thread and in any event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial as partial_call
from types import TracebackType
from typing import TypeVar, overload

from megatron_ext.api.prompt_input import ParamsForAll, Prompt, PromptReader, Prompts, ReadPrompt
from megatron_ext.api.stream import RequestStream
from megatron_ext.config import ModelConfig, RequestParams
from megatron_ext.config.in_flight import InFlight, check_version
from megatron_ext.engine.client import EngineClient
from megatron_ext.engine.client_request import EngineRequest
from megatron_ext.engine.pausing import PauseMode
from megatron_ext.engine.statistics import EngineStatistics
from megatron_ext.engine.suspending import SuspendLevel
from megatron_ext.errors import ConfigError, WeightUpdateError
from megatron_ext.mcore.adapter import InferenceEngine
from megatron_ext.memory.budget import KVCacheConfig
from megatron_ext.models.load import LoadedModel
from megatron_ext.models.update.named_tensors import NamedTensors
from megatron_ext.models.update.naming import Naming
from megatron_ext.models.update.ranks import RankWeights
from megatron_ext.models.update.shards import ShardOptions, ShardWeights
from megatron_ext.models.update.weight_update import update_weights, weight_shapes
from megatron_ext.parallel.driver import driver_of
from megatron_ext.scheduling.record import RequestRecord
from megatron_ext.text.tokenizer import Tokenizer

Result = TypeVar("Result")
Own = TypeVar("Own", bound="LoadedEngine")


class LoadedEngine:
    """Model and engine, as `load_engine` returns them; the engine steps in a thread of its own.

    Every method may be called from any thread. `generate_async` and `stream` may run in any event loops, many at once.
    The others wait for the step in flight, and would block an event loop for as long.

    Args:
        engine: Engine of the model; no other code may call it from now on.
        loaded: The model.
        naming: Tensor names of the format that the model was loaded from; None for a model of the caller.
        defaults: Parameters of requests without `RequestParams`.
        on_close: Called once, after the engine has been closed.
        shards: This rank's part of the weights.
        ranks: Updates of the weights of all ranks; None for a world of one.
    """

    def __init__(
        self,
        engine: InferenceEngine,
        loaded: LoadedModel,
        naming: Naming | None,
        defaults: RequestParams,
        on_close: Callable[[], None],
        shards: ShardWeights,
        ranks: RankWeights | None = None,
    ) -> None:
        assert loaded.config.vocab_size is not None, "a model has been built of it"
        self._engine = engine
        self._loaded = loaded
        self._naming, self._shards, self._ranks = naming, shards, ranks
        grammars = engine.controller.grammars
        self._reader = PromptReader(loaded.tokenizer, loaded.config.vocab_size, defaults, grammars)
        self._client = EngineClient(engine.core)
        self._on_close = on_close

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
        requests = [_pending(*one) for one in self._reader.read_all(prompts, params)]
        submitted = self._client.submit(requests)
        try:
            submitted.result()
            return [request.record.result() for request in requests]
        except BaseException:  # Ctrl-C, too
            self._client.abort(requests)
            raise

    async def generate_async(self, prompt: Prompt, params: RequestParams | None = None) -> RequestRecord:
        """Serve one prompt to completion; the request is aborted if the task is cancelled.

        >>> async def both():
        ...     return await asyncio.gather(engine.generate_async("A list is"), engine.generate_async([5, 6, 7]))
        >>> [record.status.name for record in asyncio.run(both())]
        ['COMPLETED', 'COMPLETED']

        Args and errors are those of `generate`, for one prompt.
        """
        request = await asyncio.to_thread(self._one, prompt, params)
        try:
            await asyncio.wrap_future(self._client.submit([request]))
            return await asyncio.wrap_future(request.record)
        except BaseException:
            self._client.abort([request])
            raise

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
            The parts; see `StreamPart`. The request begins when the first one is read. The errors are those of
            `generate`, and `RequestFailed` where the record would be `FAILED`.
        """
        return RequestStream(lambda: self._one(prompt, params), self._client, self._reader.vocabulary)

    def _call(self, function: Callable[..., Result], *arguments: object) -> Result:
        """Call a function in the engine's thread, between two steps; return its result."""
        return self._client.call(function, *arguments).result()

    def _one(self, prompt: Prompt, params: RequestParams | None) -> EngineRequest:
        return _pending(*self._reader.read_one(prompt, params))

    # Inspection

    def statistics(self) -> EngineStatistics:
        """Return current usage and counts; `statistics().prefix_cache()` has those of the cache."""
        return self._call(self._engine.core.statistics)

    @property
    def geometry(self) -> KVCacheConfig:
        """Numbers and sizes of blocks and snapshots."""
        return self._engine.geometry

    @property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of the model; a chat model's has `apply_chat_template` and `tokenize_chat`."""
        return self._loaded.tokenizer

    @property
    def model_config(self) -> ModelConfig:
        """Architecture of the model."""
        return self._loaded.config

    @property
    def model_name(self) -> str:
        """Name of the model: the checkpoint's directory as given, "embedded", or "random weights, <pattern>"."""
        return self._loaded.name

    # Cache, weights, memory

    def reset_prefix_cache(self) -> None:
        """Empty the cache: blocks cached before are never matched again."""
        self._call(self._engine.core.reset_prefix_cache)

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

        The names are those of the format that the model was loaded from: of a Hugging Face checkpoint, of the
        parameters of Megatron's model, or of this package; `weight_shapes` lists them. Values are rounded to the types
        of the parameters, and may be on any device.

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
        chosen, naming = InFlight.read(in_flight), self._names()
        check_version(weights_version)
        call = self._client.call_when_idle if chosen is InFlight.FINISH else self._client.call
        write = partial_call(self._write_weights, named_tensors, naming, partial=partial, keep_old=keep_old)
        call(self._update_weights, write, chosen, weights_version, not partial).result()

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

        The other ranks call it on their `EngineFollower`, with the same options, which are those of `update_weights`.
        Each rank gives its own part of each parameter; nothing is sent to other ranks (docs/rl.md).

        Args:
            named_shards: Local tensors, or `DTensor`s in the engine's layout, by the names of Megatron's model on this
                rank, such as `model.state_dict()`.

        Raises:
            ConfigError: A name, shape, type or layout does not fit, or options differ; names the rank. No rank has
                written anything.
            WeightUpdateError: See `update_weights`.
        """
        if not self._shards.are_handed_over:
            raise ConfigError(
                "the other ranks are in follow_engine, and hand over no shards; call load_follower on them instead, or "
                "give whole tensors to update_weights"
            )
        options = ShardOptions(partial, in_flight, weights_version, keep_old)
        call = self._client.call_when_idle if in_flight == InFlight.FINISH else self._client.call
        call(self._update_from_shards, named_shards, options).result()

    def _update_from_shards(self, named_shards: NamedTensors, options: ShardOptions) -> None:
        workers = self._engine.core.workers
        others = nullcontext() if workers.heartbeat is None else driver_of(workers).handing_over()
        with others:
            write = partial_call(self._shards.write, named_shards, options)
            self._update_weights(write, options.in_flight, options.weights_version, not options.partial)

    def _update_weights(
        self, write: Callable[[], None], in_flight: str, version: int | None, is_complete: bool
    ) -> None:
        core = self._engine.core
        core.land()
        try:
            write()
        except WeightUpdateError as error:
            core.weights_failed(error)
            raise
        core.weights_changed(InFlight(in_flight), version, is_complete=is_complete)

    def _write_weights(self, named_tensors: NamedTensors, naming: Naming, *, partial: bool, keep_old: bool) -> None:
        if self._ranks is None:
            update_weights(self._loaded.model, naming, named_tensors, partial=partial, keep_old=keep_old)
        else:
            tell = driver_of(self._engine.core.workers).tell
            self._ranks.lead(named_tensors, tell, partial=partial, keep_old=keep_old)

    def _names(self) -> Naming:
        assert self._naming is not None, "an engine that was loaded has names"
        return self._naming

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor that `update_weights` takes, by name."""
        naming, ranks = self._names(), self._ranks
        if ranks is not None:
            return dict(self._call(ranks.shapes, driver_of(self._engine.core.workers).tell))
        return weight_shapes(self._loaded.model, naming)

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
        self._call(self._engine.core.weights_changed, chosen, weights_version)

    @property
    def weights_version(self) -> int:
        """Version of the weights that tokens are computed with: the number given last, or counted on from it; or 0."""
        return self._engine.core.weights_version

    def suspend(self, level: SuspendLevel = "drop") -> None:
        """Stop until `resume`. Requests in flight wait and keep their tokens; new ones are refused.

        Args:
            level: "drop" frees the pools' memory, and the cache is empty; "offload" moves the pools to host memory, and
                "keep" leaves them where they are: nothing is computed again after these two.

        Raises:
            ConfigError: There is no such level, the engine is suspended at another one, or has several ranks, which
                only drop.
        """
        self._call(self._engine.core.suspend, level)

    def resume(self) -> None:
        """Allocate the pools again; requests in flight recompute the KV and states that were dropped, and continue."""
        self._call(self._engine.core.resume)

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
        return self._client.pause(max_seconds, mode)

    def resume_generation(self) -> None:
        """Continue to step after `pause_generation`; does nothing if generation is not paused."""
        self._client.unpause()

    @property
    def is_paused(self) -> bool:
        """True from `pause_generation` until generation is resumed."""
        return self._client.pausing is not None

    # Other interfaces over the same engine

    @property
    def client(self) -> EngineClient:
        """Client through which all requests and calls reach the engine."""
        return self._client

    @property
    def inference_engine(self) -> InferenceEngine:
        """Engine under Megatron's names; only calls through `client` may use it."""
        return self._engine

    # Shutdown

    def close(self) -> None:
        """End requests in flight with `EngineClosed`, and free all resources. Further calls do nothing."""
        if self._client.close():
            self._engine.core.resources.free()
            self._on_close()

    def __enter__(self: Own) -> Own:
        """Return the engine itself, which is closed when the block ends."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _pending(prompt: ReadPrompt, params: RequestParams) -> EngineRequest:
    return EngineRequest(prompt.tokens, params, prompt.text, continued=prompt.continued)
