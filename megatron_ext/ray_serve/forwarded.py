"""Requests that an ingress forwards to replicas, as ASGI on both sides. Needs neither Ray nor torch.

The replica's application answers a forwarded request as it would answer a connection, so that its answer has the same
code for routes, keys, limits, streams and errors. An answer is passed on from its first part on; until then a request
whose replica is lost is sent to another one, so that nothing is answered twice.
"""

from __future__ import annotations

import asyncio
import uuid
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from megatron_ext.server.anthropic.error_envelope import COUNT_PATH, MESSAGES_PATH, error_event
from megatron_ext.server.api_errors import FAULT, ApiError, ClientGone
from megatron_ext.server.http.body import HANDED_ON, SENDER_HEADER, HandedOn, parse_json, read_body, route_path
from megatron_ext.server.openai.responses_api.response_store import owner_named, owner_tag
from megatron_ext.server.openai.streaming import while_connected

if TYPE_CHECKING:
    from megatron_ext.server.openai.chat_prompt import AnsweredChat, AnswerMemory, ChatPrompt, Remember

COMPLETIONS_PATH, CHAT_PATH, RESPONSES_PATH = "/v1/completions", "/v1/chat/completions", "/v1/responses"
TOKENIZE_PATH = "/tokenize"
GENERATION_PATHS = frozenset((COMPLETIONS_PATH, CHAT_PATH, MESSAGES_PATH, RESPONSES_PATH))
PROMPT_PATHS = GENERATION_PATHS | {TOKENIZE_PATH, COUNT_PATH, f"{RESPONSES_PATH}/input_tokens"}
_CONTINUES = (b"previous_response_id", b"item_reference")  # names in bodies that are worth to be parsed
ATTEMPTS = 3  # replicas that a request is sent to
_MOST_KNOWN = 1 << 20  # bytes of answers that a conversation may continue: the latest are tried first
ANSWERED = "megatron_ext.answered"  # type and key of a message with an answer to remember
_LEAVING = 10.0  # seconds for an application to end after its client has left
_SCOPE = ("type", "http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path", "headers")
_ADDRESSES = ("client", "server")
SENDER = uuid.uuid4().hex  # id of the router in this process, by which replicas tell routers apart
_SENDER_HEADER = SENDER_HEADER.encode()
Result = TypeVar("Result")


class FirstToken:
    """Signal with one listener. It stays in its process: a copy in another one has no listener."""

    def __init__(self) -> None:
        self._listener: Callable[[], object] | None = None

    def listen(self, listener: Callable[[], object]) -> None:
        """Call a function at the first token, instead of any other."""
        self._listener = listener

    def note(self) -> None:
        """Note a part of the answer; only the first one counts."""
        listener, self._listener = self._listener, None
        if listener is not None:
            listener()

    def __reduce__(self) -> tuple[type[FirstToken], tuple[()]]:
        """Pickle without the listener."""
        return FirstToken, ()


class ReplicaLostError(Exception):
    """Error of a replica that has ended while it answered."""


class BrokenAnswerError(Exception):
    """Error of an answer that cannot be completed: the server closes the connection, so that the client sees it."""


@dataclass(frozen=True)
class PromptRequest:
    """Request whose prompts a replica is to read.

    Attributes:
        path: Path of the route.
        authorization: Authorization header; empty without one.
        body: Body of the request.
        owner: See `ForwardedRequest`.
        known: Remembered answers that a conversation may continue, by their keys; None to ask for the keys.
    """

    path: str
    authorization: bytes
    body: bytes
    owner: str | None = None
    known: Mapping[bytes, AnsweredChat] | None = None


@dataclass(frozen=True)
class ReadPrompt:
    """Prompts of a request, tokenized by a replica; without tokens if the request is not valid or generates nothing.

    Attributes:
        tokens: Packed token ids of each prompt.
        salt: Salt of the prompts' keys, bound to the caller.
        new_tokens: Maximum number of generated tokens of all choices.
        is_shared: Whether the request may find a prompt cached.
        chat: Prompt of a conversation; None for other requests.
        keys: Keys of the answers in a conversation, the last one first, which is to be read again with those known.
    """

    tokens: tuple[array[int], ...] = ()
    salt: str | None = None
    new_tokens: int = 0
    is_shared: bool = True
    chat: ChatPrompt | None = None
    keys: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class ForwardedRequest:
    """HTTP request with its whole body.

    Attributes:
        scope: Fields of the ASGI scope that are the client's.
        body: Body of the request.
        prompt: Prompts of the request; None if it has none.
        first_token: Signal of its first token.
        owner: Tag of the only replica that can answer, in the ids that it has given; None if all can.
    """

    scope: dict[str, object]
    body: bytes
    prompt: ReadPrompt | None = field(default=None, compare=False)
    first_token: FirstToken = field(default_factory=FirstToken, compare=False)
    owner: str | None = field(default=None, compare=False)

    @classmethod
    def of(
        cls, scope: Scope, body: bytes, prompt: ReadPrompt | None = None, owner: str | None = None
    ) -> ForwardedRequest:
        """Return the request of an ASGI scope, which names this process as its sender."""
        kept: dict[str, object] = {name: scope[name] for name in _SCOPE if name in scope}
        headers = [(bytes(name), bytes(value)) for name, value in scope["headers"] if bytes(name) != _SENDER_HEADER]
        kept["headers"] = [*headers, (_SENDER_HEADER, SENDER.encode())]
        kept |= {name: tuple(scope[name]) for name in _ADDRESSES if scope.get(name)}
        return cls(kept, body, prompt, owner=owner)


def owner_of(path: str, body: bytes) -> str | None:
    """Return the tag of the replica that has stored what a request names; None without one."""
    if path.startswith(f"{RESPONSES_PATH}/") and not body:
        return owner_tag(path.rpartition("/")[2])
    if not path.startswith(RESPONSES_PATH) or not any(name in body for name in _CONTINUES):
        return None
    try:
        content = parse_json(body)
    except ApiError:  # the replica reports it
        return None
    return owner_named(content) if isinstance(content, dict) else None


async def respond(
    app: ASGIApp, request: ForwardedRequest, gone: asyncio.Event | None = None
) -> AsyncGenerator[Message, None]:
    """Answer a forwarded request in a replica; the application sees a disconnect if this generator is closed.

    Args:
        app: Application of the replica.
        request: The request.
        gone: Event that means a disconnect, too: the ingress is lost.
    """
    messages: asyncio.Queue[Message | None] = asyncio.Queue()
    is_gone = gone or asyncio.Event()
    unread = [request.body]

    async def receive() -> Message:
        if unread:
            return {"type": "http.request", "body": unread.pop(), "more_body": False}
        await is_gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        messages.put_nowait(message)

    async def run() -> None:
        try:
            await app(scope, receive, send)
        finally:
            messages.put_nowait(None)

    def remember(*answer: object) -> None:
        messages.put_nowait({"type": ANSWERED, ANSWERED: answer})

    scope: Scope = {**request.scope, "asgi": {"version": "3.0"}, "state": {}, "extensions": {}}
    prompt = request.prompt or ReadPrompt()
    scope[HANDED_ON] = HandedOn(prompt.tokens, prompt.chat, remember)
    running = asyncio.create_task(run())
    try:
        while (message := await messages.get()) is not None:
            yield message
        await running
    finally:
        is_gone.set()
        if not running.done():  # it sees the disconnect, and may still end by itself
            await asyncio.wait((running,), timeout=_LEAVING)
            running.cancel()


class IngressApp:
    """ASGI application that forwards requests to replicas.

    Args:
        read: Returns the prompts of a request.
        forward: Sends a request to a replica and yields its answer.
        max_body_bytes: Maximum size of a body.
        answers: Memory of the answers of all replicas.
    """

    def __init__(
        self,
        read: Callable[[PromptRequest], Awaitable[ReadPrompt]],
        forward: Callable[[ForwardedRequest], AsyncIterator[Message]],
        max_body_bytes: int,
        answers: AnswerMemory,
    ) -> None:
        self._read, self._forward, self._limit, self._answers = read, forward, max_body_bytes, answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or take part in the server's life."""
        if scope["type"] == "lifespan":
            for stage in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{stage}.complete"})
            return
        if scope["type"] != "http":
            return
        try:
            body = await read_body(Request(scope, receive), self._limit)
            await while_connected(receive, self._answer(scope, body, send))
        except ClientGone:
            return
        except ApiError as error:
            await error.to_response()(scope, receive, send)

    async def _answer(self, scope: Scope, body: bytes, send: Send) -> None:
        prompt, path = None, route_path(scope)
        owner = owner_of(path, body)
        if scope["method"] == "POST" and path in PROMPT_PATHS and body:
            authorization = dict(scope["headers"]).get(b"authorization", b"")
            prompt = await self._prompt(PromptRequest(path, authorization, body, owner))
        request = ForwardedRequest.of(scope, body, prompt, owner)
        answer = Answer(send, path, self._answers.put)
        await self._tried(lambda: answer.take(self._forward(request)))

    async def _prompt(self, request: PromptRequest) -> ReadPrompt:
        """Return the prompts of a request; a conversation's with the answers that are remembered here."""
        if not len(self._answers):
            request = replace(request, known={})
        prompt = await self._tried(lambda: self._read(request))
        if not prompt.keys:
            return prompt
        informed = replace(request, known=self._answers.find(prompt.keys, _MOST_KNOWN))
        prompt = await self._tried(lambda: self._read(informed))
        if prompt.chat is not None and prompt.chat.answer is not None:
            self._answers.use(prompt.chat.answer)
        return prompt

    async def _tried(self, work: Callable[[], Awaitable[Result]]) -> Result:
        """Run work that may lose its replica, several times at most.

        Raises:
            ApiError: Every replica was lost.
        """
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return await work()
            except ReplicaLostError as error:
                if attempt == ATTEMPTS:
                    raise lost(error) from None
        raise AssertionError("the last attempt returns or raises")


class Answer:
    """Answer on its way to the client: its head is sent with the first part of its body.

    Args:
        send: Sends a message to the client.
        path: Path of the route.
        remember: Remembers an answer of a chat.

    Attributes:
        has_begun: Whether the client has a part of it.
        is_complete: Whether the client has all of it.
    """

    def __init__(self, send: Send, path: str, remember: Remember = lambda *_: None) -> None:
        self._send, self._remember = send, remember
        self._path = path
        self._head: Message | None = None
        self.has_begun = self.is_complete = False

    async def take(self, messages: AsyncIterator[Message]) -> None:
        """Pass an answer on.

        Raises:
            ReplicaLostError: The replica was lost before the client got anything.
            BrokenAnswerError: It was lost in the middle of an answer that is not a stream.
        """
        try:
            async for message in messages:
                if message["type"] == ANSWERED:
                    self._remember(*message[ANSWERED])
                else:
                    await self.send(message)
        except ReplicaLostError as error:
            if not self.is_complete:
                await self.lose(error)

    async def send(self, message: Message) -> None:
        """Pass a message of the answer on."""
        if message["type"] == "http.response.start":
            self._head = message
            return
        if self._head is not None and not self.has_begun:
            self.has_begun = True
            await self._send(self._head)
        await self._send(message)
        self.is_complete = not message.get("more_body", False)

    async def lose(self, error: ReplicaLostError) -> None:
        """End an answer of which nothing more will come; it may be taken anew if this raises `ReplicaLostError`.

        Raises:
            ReplicaLostError: The client has got nothing yet.
            BrokenAnswerError: It has a part of an answer that is not a stream.
        """
        if self._head is None or not self.has_begun:
            raise error
        kind = dict(self._head["headers"]).get(b"content-type", b"")
        if not kind.startswith(b"text/event-stream"):
            raise BrokenAnswerError(f"the replica was lost in the middle of its answer: {error}") from None
        await self._send(
            {"type": "http.response.body", "body": error_event(lost(error), self._path), "more_body": False}
        )


def lost(error: ReplicaLostError) -> ApiError:
    """Return the error for a client whose replica was lost."""
    return ApiError(503, f"the replica that answered was lost: {error}", kind=FAULT, code="replica_lost")
