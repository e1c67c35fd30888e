"""State of a loaded server that its routes share."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from array import array
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, TypeVar

from fastapi import Depends, Request

from megatron_ext.config import ServerConfig
from megatron_ext.config.annotations import FieldValues
from megatron_ext.config.in_flight import InFlight
from megatron_ext.config.server import MB
from megatron_ext.console.profiling import StepTracer
from megatron_ext.errors import ConfigError
from megatron_ext.models.identity import weights_hash
from megatron_ext.models.llm_engine import LLMEngine
from megatron_ext.models.update.disk import WeightsRoot
from megatron_ext.scheduling.record import RequestRecord
from megatron_ext.server.api_errors import ApiError, ContextExceeded, unknown_model
from megatron_ext.server.api_keys import Keys, load_keys
from megatron_ext.server.http.auth import CALLER
from megatron_ext.server.http.body import handed_on_to
from megatron_ext.server.log import printable
from megatron_ext.server.monitoring.cache_view import CacheView
from megatron_ext.server.monitoring.metrics import History, Metrics
from megatron_ext.server.openai.chat import ChatFormat
from megatron_ext.server.openai.chat_prompt import (
    AnsweredChat,
    AnswerMemory,
    ChatPrompt,
    Conversation,
    Remember,
    common_length,
    read_answer,
)
from megatron_ext.server.openai.protocol import ChatRequest, Message, dicts_of
from megatron_ext.server.openai.responses_api.response_store import ResponseStore
from megatron_ext.server.openai.structured_output_checks import StructuredOutputChecks
from megatron_ext.server.request_manager import RequestManager
from megatron_ext.text.chat_template import ChatOptions
from megatron_ext.text.chat_tokens import ASSISTANT
from megatron_ext.text.tokenizer import TextTokenizer, Tokenizer, tokenize_prompt
from megatron_ext.text.tool_calls.formats import AnswerFormat

if TYPE_CHECKING:
    from megatron_ext.server.routes.tokens import TokenizeRequest

Result = TypeVar("Result")

# Characters. Tokenization takes hundreds of bytes a character: several longer texts at once would add up.
LONG_TEXT = 100_000
# Texts up to this length take less time than waking a thread while the engine's runs (some 0.3 ms).
SHORT_TEXT = 512
logger = logging.getLogger(__name__)
LONGEST_PATH = 500  # characters of a path in a log line


class TextEncoder:
    """Encoder of prompts, in threads, or on the event loop if they are short.

    Long texts are refused if they cannot fit, and otherwise tokenized one at a time.

    Args:
        tokenizer: Tokenizer of the model.
        tokenize: A text to ids; called in threads.
        longest_sequence: Maximum number of tokens of a prompt.
    """

    def __init__(self, tokenizer: Tokenizer, tokenize: Callable[[str], list[int]], longest_sequence: int) -> None:
        self._tokenize = tokenize
        # None: a token can stand for text of any length, as in prompts of ids separated by spaces.
        token = tokenizer.longest_token if isinstance(tokenizer, TextTokenizer) else None
        self._sequence = longest_sequence
        self._max = None if token is None else longest_sequence * token
        self._one_by_one = ThreadPoolExecutor(1, "long texts")

    async def encode(self, text: str, tokenize: Callable[[str], list[int]] | None = None) -> list[int]:
        """Return the ids of a text, by a function in place of the tokenizer alone if one is given; see `run`."""
        return await self.run(text, tokenize or self._tokenize)

    async def run(self, text: str, tokenize: Callable[[str], Result]) -> Result:
        """Return the result of a function that tokenizes a text.

        Raises:
            ApiError: The text is too long under any tokenization.
            ConfigError: The tokenizer cannot read the text.
        """
        if self._max is not None and len(text) > self._max:
            most = f"the limit of {self._sequence} tokens has at most {self._max} characters"
            excess = f"a prompt of {len(text)} characters is too long; {most}"
            raise ContextExceeded(excess, -(-len(text) * self._sequence // self._max), 0, self._sequence, "prompt")
        if len(text) <= SHORT_TEXT:
            return tokenize(text)
        if len(text) <= LONG_TEXT:
            return await asyncio.to_thread(tokenize, text)
        return await asyncio.get_running_loop().run_in_executor(self._one_by_one, tokenize, text)


@dataclass(eq=False)
class WeightsUpdater:
    """Reader of checkpoints below a directory into the model, one at a time.

    Args:
        root: Directory of the checkpoints; nothing outside is read.
        engine: Engine of the model, with a writer of weights.

    Attributes:
        weights_hash: Hash of the weights that were written last; empty before the first update.
    """

    root: WeightsRoot
    engine: LLMEngine
    weights_hash: str = ""
    _one_at_a_time: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def update(self, path: str, in_flight: InFlight = InFlight.RECOMPUTE, version: int | None = None) -> int:
        """Read a checkpoint, and write it if it fits.

        Args:
            path: Path of the checkpoint's directory, below the root.
            in_flight: Treatment of requests in flight.
            version: Number of the new weights; one more than the last if missing.

        Returns:
            Number of tensors written.

        Raises:
            ConfigError: See `WeightsRoot.resolve` and `read_new_weights`. Nothing has been written.
        """
        async with self._one_at_a_time:
            write, found = await asyncio.to_thread(self._read, path)
            count = await asyncio.wrap_future(self.engine.change_weights(write, in_flight, version))
            self.weights_hash = found
        logger.info("weights are now from %s", printable(path, LONGEST_PATH))
        return count

    def _read(self, path: str) -> tuple[Callable[[], int], str]:
        """Return a function that writes the weights, and their hash."""
        directory = self.root.resolve(path)
        found = weights_hash(directory)
        return self.engine.weight_writer.read_checkpoint(directory), found


@dataclass(eq=False)
class Serving:
    """Shared state of the routes.

    Args:
        engine: Model with its engine.
        model: Name that the model is served under; the settings may have others.
        settings: Limits and access settings.
        keys: API keys; by default the keys that the settings name.
        root: Directory of the model's tokenizer, for clients on this machine; by default the model's name.
        updater: Reader of new weights; None if not enabled.
        defaults: The model's values of `RequestParams` fields that a body leaves out.
        weights_hash: Hash of the weights; changes with an update.
        tracer: Tracer of the engine's steps; None without `--profile`.
        is_shared: Whether other code uses the engine, too, and closes it; otherwise the server does at its end.
    """

    engine: LLMEngine
    model: str
    settings: ServerConfig
    keys: Keys | None = None
    root: str | None = None
    updater: WeightsUpdater | None = None
    defaults: FieldValues = field(default_factory=dict)
    weights_hash: str = "-"
    is_shared: bool = False
    tracer: StepTracer | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    instance: str = field(default_factory=lambda: uuid.uuid4().hex)  # of this process; changes with a restart

    def __post_init__(self) -> None:
        self.keys = self.keys or load_keys(self.settings)
        self.metrics = Metrics(self.model)
        self.history = History(self.metrics)
        capacity = self.engine.max_running_requests + self.settings.max_waiting_requests
        self.requests = RequestManager(self.engine, self.metrics, capacity, is_shared=self.is_shared)
        self.cache = CacheView(self.engine, self.requests, self.metrics)
        self.tokenizer: Tokenizer = self.engine.tokenizer
        self.vocabulary = self.engine.vocabulary
        self.chat_format = ChatFormat(
            self.tokenizer,
            parse_control=self.settings.chat_control_tokens == "parse",
            tool_calls=self.settings.tool_call_parser,
            reasoning_name=self.settings.reasoning_parser,
        )
        sizes = self.settings.limits
        self.response_store = ResponseStore(int(sizes.responses_store_mb * MB), max_conversation=sizes.body_bytes)
        self.limits = self.engine.limits
        self.answers = AnswerMemory(self.settings.limits.answers_bytes)
        self.structured_outputs = StructuredOutputChecks(self.engine.grammars, self.settings.limits)
        tokenize, longest = partial(tokenize_prompt, self.tokenizer), self.limits.max_model_len
        self.text_encoder = TextEncoder(self.tokenizer, tokenize, longest)

    @property
    def names(self) -> tuple[str, ...]:
        """Return all names that the model is served under."""
        return (self.model, *self.settings.served_model_name[1:])

    async def chat_prompt(self, request: Request, body: ChatRequest | TokenizeRequest) -> ChatPrompt:
        """Return the prompt of a request's conversation: as a router has handed it on, or else tokenized here.

        Errors are as of `conversation` and `read_chat`.
        """
        handed_on = handed_on_to(request.scope).chat
        if handed_on is not None:
            return handed_on
        assert body.messages is not None, "the route reads a text without messages by itself"
        scope, sent = request.scope[CALLER].bind(body.cache_salt), body.reads_sent_ids
        found = await self.conversation(body.messages, body.chat_options, scope, reads_sent_ids=sent)
        return await self.read_chat(found)

    async def conversation(
        self,
        messages: Sequence[Message],
        options: ChatOptions,
        scope: str | None,
        *,
        reads_sent_ids: bool = True,
        renders_answered: bool = True,
    ) -> Conversation:
        """Return a conversation, to be tokenized by `read_chat`.

        Args:
            messages: The conversation.
            options: Template options.
            scope: Tenant and cache salt, whose answers it may continue.
            reads_sent_ids: Whether token ids that the last message of the assistant carries are used.
            renders_answered: Whether it is rendered here if it has answers.

        Raises:
            ApiError: Arguments of tool calls exceed the limits of one request.
            ConfigError: There is no template, it refuses the messages, or token ids are out of range.
        """
        answers = [
            (i, one.prompt_token_ids, one.generation_token_ids)
            for i, one in enumerate(messages)
            if one.role == ASSISTANT
        ]
        sent = {i: (before, own) for i, before, own in answers if before is not None and own is not None}
        if not reads_sent_ids or not sent or max(sent) != answers[-1][0]:
            sent = {}
        for before, own in sent.values():
            self.vocabulary.check_prompt(before)
            self.vocabulary.check_prompt(own)

        def read() -> Conversation:
            dicts = dicts_of(messages)
            found = Conversation(dicts, scope, self.chat_format, options, sent)
            if renders_answered or not found.places:
                found.chat  # noqa: B018  # rendered here, in a thread
            return found

        return await asyncio.to_thread(read)

    async def read_chat(
        self, conversation: Conversation, known: Mapping[bytes, AnsweredChat] | None = None
    ) -> ChatPrompt:
        """Return the prompt of a conversation.

        Args:
            conversation: The conversation.
            known: Answers that it may continue, by their keys; by default all answers that this server remembers.

        Errors are as of `TextEncoder.run` and `Conversation.tokenize`.
        """
        answers = self.answers.find(conversation.places.values()) if known is None else known
        prompt = await self.text_encoder.run(conversation.chat.text, lambda _: conversation.tokenize(answers))
        if prompt.answer is not None:
            self.answers.use(prompt.answer)
        return prompt

    def remember(self, prompt: ChatPrompt, answer_format: AnswerFormat, put: Remember, record: RequestRecord) -> None:
        """Remember the token ids of an answer for the next turn of its conversation.

        Args:
            prompt: Prompt of the answer.
            answer_format: Format of the answer.
            put: Called with the answered conversation.
            record: The answer.
        """
        if self.answers.is_on:
            _, content, calls = read_answer(record.generated_text, record.finish_reason, answer_format)
            chat = prompt.answered(record.generated_tokens, self.chat_format)
            put(prompt.key(content, calls), chat, prompt.answer)

    async def marked_positions(
        self,
        body: ChatRequest,
        prompt: Sequence[int],
        scope: str | None = None,
        known: Mapping[bytes, AnsweredChat] | None = None,
    ) -> tuple[int, ...]:
        """Return the positions of a chat's `cache_control` marks in its prompt, the last one first.

        A mark is where the prompt ends having tokens in common with the conversation up to the mark. A template that
        refuses to render such a part of a conversation gives no position.

        Args:
            body: The chat.
            prompt: Token ids of its prompt.
            scope: See `conversation`.
            known: See `read_chat`.

        Raises:
            ApiError: See `TextEncoder.run`.
        """
        prefixes = body.marked_prefixes
        if not prefixes:
            return ()
        options = replace(body.chat_options, add_generation_prompt=False, continue_final_message=False)
        positions: set[int] = set()
        for messages in prefixes:
            with suppress(ConfigError):
                marked = await self.conversation(messages, options, scope, reads_sent_ids=body.reads_sent_ids)
                ids = (await self.read_chat(marked, known)).ids
                positions.add(common_length(array("i", prompt), array("i", ids)))
        return tuple(sorted(positions - {0}, reverse=True))

    def explainer(self) -> Callable[..., str]:
        """Return the decoder of the text in prefix cache explanations.

        Raises:
            ApiError: Explanations are off, or hidden.
        """
        why = "" if self.engine.limits.explains else "the server was started without --explain-prefix-cache"
        if self.settings.hide_cache_counts:
            why = "--hide-cache-counts hides it"
        if why:
            message, name = f"explain_prefix_cache: {why}; leave it out", "explain_prefix_cache"
            raise ApiError(400, message, param=name, code="not_explained")
        return self.vocabulary.detokenize

    def check_name(self, name: str | None) -> None:
        """Check that a name, if there is one, is one of this model's.

        Raises:
            ApiError: The name is another model's.
        """
        if name is not None and not self.is_name(name):
            raise unknown_model(name, *self.names)

    def answered_name(self, name: str | None) -> str:
        """Return the model's name in the answer to a request for `name`: that one, if the model is served under it."""
        return name if name in self.names and name is not None else self.model

    def is_name(self, name: str) -> bool:
        """Return whether a name is the model's: a served one, or its root, which load generators send."""
        return name in (*self.names, self.root)

    def describe(self, name: str) -> dict[str, object]:
        """Return OpenAI's model object under one of the model's names."""
        return {
            "id": name,
            "object": "model",
            "created": self.created,
            "owned_by": "megatron_ext",
            "root": self.root or self.model,
            "parent": None,
            "max_model_len": self.limits.max_model_len,
        }


async def _serving(request: Request) -> Serving:  # without `async` FastAPI calls it in a thread
    return request.app.state.serving


ServerDependency = Annotated[Serving, Depends(_serving)]
