"""Objects of this package that a chat request passes, from its route to its first sampled token.

An object is passed if it carries the request (its body, text, token ids or parameters, or an object made from these),
or if one of its methods is called with something that does. There are three kinds:

- made for the request: its body, and what is made from the call of its route until it is in the scheduler's queue;
  these objects live as long as the request or its answer;
- made for a step: what is made from then on, the plan, the message, the inputs and the result of the step that computes
  it. They serve all requests of that step, and the next step has new ones;
- called: what existed before.

Not seen: parts that get nothing of the request when they are made (a `Request` makes its own timeline, counts and
random generator), and what is only referred to by a closure.
"""

from __future__ import annotations

import sys
import threading
from array import array
from collections.abc import Iterator, Sequence
from functools import partial
from types import FrameType, FunctionType

from benchmarks.cases import Run, case

PACKAGE = "megatron_ext"
CONTAINERS = (list, tuple, set, frozenset)
DEPTH = 3  # of containers inside of containers that are searched for objects
ELEMENTS = 8  # of a container that are looked at
LONGEST = 4_096  # tokens of sequences that are searched for the prompt
NO_PROMPT = "-"  # in no joined tokens
TEXT = "What does json.loads do?"
FIRST_TEXT = "What is a list?"  # of a request before it, which makes what all requests share
REQUEST, STEP, CALLED = "made for the request", "made for a step", "called"


class Passed:
    """Objects that a request passes, noted by a profile function.

    Args:
        first: Function whose call begins the path; its first argument carries the request.
        queue: Function whose return ends the way to the queue.
        last: Function whose call ends the path.

    Attributes:
        objects: Passed objects, in the order of their first call.
        queued: Number of those until the request was in the scheduler's queue.
        prompt: `joined` token ids of the text; to be set before the request is sent. Earlier ones are not followed.
    """

    def __init__(self, first: FunctionType, queue: FunctionType, last: FunctionType) -> None:
        self.objects: list[object] = []
        self.queued = 0
        self.prompt = NO_PROMPT
        self._first, self._queue, self._last = first.__code__, queue.__code__, last.__code__
        self._ids: set[int] = set()
        self._carriers: set[int] = set()
        self._made: dict[int, object] = {}  # since the route was called; kept, so that no other object gets an id
        self._is_on = self._has_begun = False
        self._lock = threading.RLock()

    def __enter__(self) -> Passed:
        threading.setprofile(self._follow)  # threads that start from now on
        sys.setprofile(self._follow)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def kinds(self) -> dict[str, list[str]]:
        """Return the class names of the objects by their kind, each in the order of their first call."""
        found: dict[str, list[str]] = {REQUEST: [], STEP: [], CALLED: []}
        for place, one in enumerate(self.objects):
            made = REQUEST if place < self.queued else STEP
            found[made if id(one) in self._made else CALLED].append(type(one).__name__)
        return found

    def _follow(self, frame: FrameType, event: str, value: object) -> None:
        if event not in ("call", "return"):
            return
        with self._lock:
            if event == "call":
                self._called(frame)
            elif self._is_on:
                self._returned(frame, value)

    def _called(self, frame: FrameType) -> None:
        code = frame.f_code
        if code is self._first and self.prompt != NO_PROMPT and not self._has_begun:  # resuming it is a call, too
            self._is_on = self._has_begun = True
            body = frame.f_locals[code.co_varnames[0]]
            self._made[id(body)] = body
            self._carry(body)
        if not self._is_on:
            return
        arguments = _arguments(frame)
        owner = _owner(frame)
        if code.co_name == "__init__" and owner is not None:
            self._made[id(owner)] = owner
        if owner is not None and self._carries(arguments):
            if id(owner) in self._made:
                self._carry(owner)
            self._pass(owner)
        if code is self._last:
            self._is_on = False

    def _returned(self, frame: FrameType, value: object) -> None:
        """Let new objects carry the request that a function has made of one that does."""
        if frame.f_code is self._queue:
            self.queued = len(self.objects)
        if self._carries(_arguments(frame)):
            for one in _ours(value):
                if id(one) in self._made:
                    self._carry(one)

    def _carries(self, arguments: list[object]) -> bool:
        return any(
            _is_prompt(argument, self.prompt) or any(id(one) in self._carriers for one in _ours(argument))
            for argument in arguments
        )

    def _carry(self, one: object) -> None:
        self._carriers.add(id(one))
        self._pass(one)

    def _pass(self, one: object) -> None:
        if id(one) not in self._ids:
            self._ids.add(id(one))
            self.objects.append(one)


def _is_prompt(value: object, prompt: str) -> bool:
    """Return whether the value has the text of the request, or its token ids."""
    if isinstance(value, str):
        return TEXT in value
    is_sequence = isinstance(value, (list, tuple, array)) and 0 < len(value) < LONGEST
    return is_sequence and isinstance(value[0], int) and prompt in joined(value)


def joined(tokens: Sequence[int]) -> str:
    """Return token ids as a text in which a part of them can be found."""
    return "," + ",".join(map(str, tokens)) + ","


def _owner(frame: FrameType) -> object | None:
    """Return the object whose method is called, if it is of this package."""
    code = frame.f_code
    if not code.co_argcount or code.co_varnames[0] != "self":
        return None
    one = frame.f_locals.get("self")
    return one if _is_ours(one) else None


def _arguments(frame: FrameType) -> list[object]:
    code, values = frame.f_code, frame.f_locals
    count = code.co_argcount + code.co_kwonlyargcount
    return [values[name] for name in code.co_varnames[:count] if name in values]


def _is_ours(one: object) -> bool:
    return type(one).__module__.partition(".")[0] == PACKAGE


def _ours(value: object, depth: int = DEPTH) -> Iterator[object]:
    """Yield objects of this package: the value itself, or elements of containers."""
    if _is_ours(value):
        yield value
    elif depth and isinstance(value, CONTAINERS):
        for one in list(value)[:ELEMENTS]:
            yield from _ours(one, depth - 1)
    elif isinstance(value, partial):
        yield from _ours([*value.args, *value.keywords.values()], depth)
    elif depth and isinstance(value, dict):
        for one in list(value.values())[:ELEMENTS]:
            yield from _ours(one, depth - 1)


def passed() -> Passed:
    """Serve one chat request with the embedded model, and return the objects that it passed."""
    import httpx

    from megatron_ext.config import BatchingConfig, CacheConfig, ServerConfig, ServerSettings
    from megatron_ext.engine.core import EngineCore
    from megatron_ext.mcore import platform
    from megatron_ext.scheduling.scheduler import Scheduler
    from megatron_ext.server.routes.generation import create_chat_completion
    from megatron_ext.server.run import bind, build_server, build_serving

    platform.initialize()
    server_settings = ServerConfig(port=0, access_log=False)
    settings = ServerSettings(batching=BatchingConfig(), cache=CacheConfig(), server=server_settings)
    urls: list[str] = []
    ready = threading.Event()

    def on_ready(url: str) -> None:
        urls.append(url)
        ready.set()

    with Passed(create_chat_completion, EngineCore.add, Scheduler.commit) as found:
        serving = build_serving(settings)  # starts the engine's thread
        server = build_server(serving, on_ready)
        loop = threading.Thread(target=server.run, kwargs={"sockets": [bind("127.0.0.1", 0)]}, daemon=True)
        loop.start()
        ready.wait()
        for text in (FIRST_TEXT, TEXT):
            if text == TEXT:
                found.prompt = joined(serving.tokenizer.tokenize(TEXT))
            body = {"messages": [{"role": "user", "content": text}], "max_tokens": 4}
            httpx.post(f"{urls[0]}/v1/chat/completions", json=body, timeout=60).raise_for_status()
    server.should_exit = True
    loop.join()
    return found


@case("baseline", quick={})
def chat_objects(run: Run) -> None:
    """Objects of our classes that one chat request makes, or that are called with it, until its first sampled token."""
    kinds = passed().kinds()
    names = [name for found in kinds.values() for name in dict.fromkeys(found)]
    for name in dict.fromkeys(names):
        run.row(name, {kind: found.count(name) or None for kind, found in kinds.items()})
    run.row("all", {kind: len(found) for kind, found in kinds.items()})
