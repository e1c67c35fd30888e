"""An engine that has been loaded, as a program uses it: from any thread, and in any event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import TypeVar, overload

from megatron_ext.api.prompts import ParamsForAll, Prompt, PromptReader, Prompts, ReadPrompt
from megatron_ext.api.stream import RequestStream
from megatron_ext.config import ModelConfig, RequestParams
from megatron_ext.engine.client import EngineClient
from megatron_ext.engine.client_request import EngineRequest
from megatron_ext.engine.statistics import EngineStatistics
from megatron_ext.errors import ConfigError
from megatron_ext.mcore.adapter import InferenceEngine
from megatron_ext.memory.budget import KVCacheConfig
from megatron_ext.models.load import LoadedModel
from megatron_ext.models.update.named_tensors import NamedTensors
from megatron_ext.models.update.naming import Naming
from megatron_ext.models.update.weights import update_weights, weight_shapes
from megatron_ext.scheduling.record import RequestRecord
from megatron_ext.text.tokenizer import Tokenizer

Result = TypeVar("Result")


class LoadedEngine:
    """What `load_engine` returns: a model with an engine around it, which steps in a thread of its own.

    Every method may be called from any thread. `generate_async` and `stream` may run in any event loops, many at once.
    The others wait for the step in flight, so in an event loop they hold it up for as long.

    Args:
        engine: Around the model; nobody else may call it from now on.
        loaded: The model.
        naming: What the format that it was loaded from calls its tensors; None if it is spread over ranks.
        defaults: What a request asks for that brings no `RequestParams`.
        on_close: Called once, when everything is over.
    """

    def __init__(
        self,
        engine: InferenceEngine,
        loaded: LoadedModel,
        naming: Naming | None,
        defaults: RequestParams,
        on_close: Callable[[], None],
    ) -> None:
        assert loaded.config.vocab_size is not None, "a model has been built of it"
        self._engine = engine
        self._loaded = loaded
        self._naming = naming
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
        """Serve prompts to the end.

        >>> records = engine.generate(["The import statement", "A list is"], RequestParams(num_tokens_to_generate=8))
        >>> [len(record.generated_tokens) for record in records]
        [8, 8]
        >>> (record,) = engine.generate("The import statement", RequestParams(num_tokens_to_generate=8))
        >>> record.generated_text == records[0].generated_text
        True

        Args:
            prompts: A text, or token ids (a list, a tensor or an array of whole numbers), or several of those, mixed as
                you like.
            params: For all of them, or one for each; None: what the engine was loaded with.

        Returns:
            A record for each prompt, in their order. One that can never be served, such as one that is longer than the
            model, is `FAILED` and says why in `error`; the others do not notice.

        Raises:
            ConfigError: A prompt or its parameters make no sense. None of the prompts is served.
            EngineSuspended: The engine is suspended. None of the prompts is served.
            EngineClosed: The engine is closed, or was closed meanwhile.
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
        """Serve one prompt to the end; when the task is cancelled the request is aborted.

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
        """Serve one prompt part by part; when the loop is left or its task is cancelled the request is aborted.

        >>> async def show():
        ...     async for part in engine.stream("A list is", RequestParams(num_tokens_to_generate=8)):
        ...         print(part.tokens, repr(part.text))
        >>> asyncio.run(show())
        (1296,) ' created'
        (18,) '.'
        ...

        Returns:
            The parts; see `StreamPart`. The request begins with the first one. The errors are those of `generate`, and
            `RequestFailed` where its record would say so.
        """
        return RequestStream(lambda: self._one(prompt, params), self._client, self._reader.vocabulary)

    def _call(self, function: Callable[..., Result], *arguments: object) -> Result:
        """Call a function in the engine's thread, between two steps, and wait for it."""
        return self._client.call(function, *arguments).result()

    def _one(self, prompt: Prompt, params: RequestParams | None) -> EngineRequest:
        return _pending(*self._reader.read_one(prompt, params))

    # What there is

    def statistics(self) -> EngineStatistics:
        """What is in use and what has happened; `statistics().prefix_cache()` is that of the cache."""
        return self._call(self._engine.core.statistics)

    @property
    def geometry(self) -> KVCacheConfig:
        """How many blocks and snapshots there are, and what one takes."""
        return self._engine.geometry

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's; that of a chat model has `apply_chat_template` and `tokenize_chat`."""
        return self._loaded.tokenizer

    @property
    def model_config(self) -> ModelConfig:
        """The model's architecture."""
        return self._loaded.config

    @property
    def model_name(self) -> str:
        """The checkpoint's directory as given, "embedded", or "random weights, <pattern>"."""
        return self._loaded.name

    # The cache, the weights, the memory

    def reset_prefix_cache(self) -> None:
        """Empty the cache: nothing cached before is matched after."""
        self._call(self._engine.core.reset_prefix_cache)

    def update_weights(self, named_tensors: NamedTensors, *, partial: bool = False) -> None:
        """Write new weights in place, all or nothing, between two steps; the cache is emptied.

        The names are those of the format that the model was loaded from: of a Hugging Face checkpoint, of the
        parameters of Megatron's model, or our own; `weight_shapes` lists them. Values are rounded to the types that the
        parameters have, and may be on any device.

        >>> new = {name: torch.zeros(shape) for name, shape in engine.weight_shapes().items()}
        >>> with load_engine(buffer_size_gb=0.1) as other:
        ...     other.update_weights(new)
        ...     (record,) = other.generate("A list is", RequestParams(num_tokens_to_generate=3, ignore_eos=True))
        >>> record.generated_tokens
        (0, 0, 0)

        Requests in flight go on with the new weights, on what was computed with the old ones; nothing of theirs is
        cached. Whatever has to be converted or moved is made ready first, in as much memory again: give large models in
        buckets, with `partial`.

        Args:
            named_tensors: A dict, or pairs of name and tensor, such as `model.named_parameters()`.
            partial: Tensors may be missing, and stay as they are.

        Raises:
            ConfigError: A name that is not known or missing, another shape or type, with the tensor's name. Nothing has
                been written.
        """
        self._call(self._update_weights, named_tensors, self._names(), partial)

    def _update_weights(self, named_tensors: NamedTensors, naming: Naming, partial: bool) -> None:
        update_weights(self._loaded.model, naming, named_tensors, partial=partial)
        self._engine.core.weights_changed()

    def _names(self) -> Naming:
        if self._naming is None:
            raise ConfigError("weights are written on one rank only, and this engine has several; load it anew")
        return self._naming

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor that `update_weights` takes, by name, with its shape."""
        return weight_shapes(self._loaded.model, self._names())

    def weights_changed(self) -> None:
        """Say that the model's weights have been written in place by somebody else: the cache is emptied."""
        self._call(self._engine.core.weights_changed)

    def suspend(self) -> None:
        """Give the pools' memory back. Requests in flight wait and keep their tokens; new ones are refused."""
        self._call(self._engine.core.suspend)

    def resume(self) -> None:
        """Allocate the pools again; requests in flight compute what they had computed, and go on."""
        self._call(self._engine.core.resume)

    # The end

    def close(self) -> None:
        """End what is in flight with `EngineClosed`, and give everything back. Further calls of it do nothing."""
        if self._client.close():
            self._engine.core.resources.free()
            self._on_close()

    def __enter__(self) -> LoadedEngine:
        """The engine itself, which is closed when the block ends."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _pending(prompt: ReadPrompt, params: RequestParams) -> EngineRequest:
    return EngineRequest(prompt.tokens, params, prompt.text)
