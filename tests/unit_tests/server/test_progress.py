"""Updates of streamed requests to the event loop, each only as large as its new tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from megatron_ext.engine.input_processor import InputProcessor
from megatron_ext.scheduling.request import Request
from megatron_ext.server.openai.protocol import CompletionRequest
from megatron_ext.server.openai.responses import CompletionResponseBuilder
from megatron_ext.server.openai.streaming import _ChoiceStream
from megatron_ext.server.request_manager import RequestHandle
from megatron_ext.text.vocabulary import Vocabulary
from tests.priority import TestPriority
from tests.unit_tests.scheduling.builders import make_request
from tests.unit_tests.support.tokenizers import PieceTokenizer

pytestmark = pytest.mark.priority(TestPriority.HIGH)

VOCABULARY = Vocabulary(PieceTokenizer(97), 97)
STEPS = 40


class CountingList(list):
    """Counts the items that are copied out of it."""

    copied = 0

    def __getitem__(self, index):
        if isinstance(index, slice):
            self.copied += len(range(*index.indices(len(self))))
        return super().__getitem__(index)

    def __iter__(self) -> Iterator:
        self.copied += len(self)
        return super().__iter__()


def generate(request: Request, count: int = 1) -> None:
    """Append tokens to a request as a step does, `count` times."""
    for _ in range(count):
        token = request.generated_count % 97
        request.append(token)
        request.output.generated_log_probs.append(-token / 10)
        request.output.generated_top_n.append({token: -token / 10})


def scored_request() -> Request:
    request = make_request(0, prompt=3)
    request.output.prompt_log_probs += [-0.5, -0.25]
    request.output.prompt_top_n += [{1: -0.5}, {2: -0.25}]
    return request


def streamed(request: Request, *, is_streamed: bool = True) -> RequestHandle:
    """The handle of a request that the engine has."""
    return RequestHandle(request.inputs, is_streamed=is_streamed, request=request)


def sent(readings: list[int]) -> tuple[str, list[float]]:
    """Text and log-probs of a choice whose client looks after so many tokens each time."""
    request = scored_request()
    handle = streamed(request)
    body = CompletionRequest.model_construct(logprobs=0)
    builder = CompletionResponseBuilder(body, "tiny", VOCABULARY, ["<1>"])
    stream = _ChoiceStream(0, handle, handle, builder)
    parts = []
    for count in range(1, STEPS + 1):
        generate(request)
        handle.collect()
        handle.take(handle.updates.popleft())
        if count in readings:
            parts += stream.parts()
    choices = [part["choices"][0] for part in parts]
    scores = [value for choice in choices for value in choice["logprobs"]["token_logprobs"]]
    return "".join(choice["text"] for choice in choices), scores


def test_a_late_reader_gets_the_same():
    """Reading after every token, now and then, or once at the end gives equal results."""
    promptly = sent(list(range(1, STEPS + 1)))
    assert promptly[0] == "<1>" + "".join(f"<{token}>" for token in range(STEPS))
    assert promptly[1] == [None, -0.5, -0.25, *(-token / 10 for token in range(STEPS))]
    assert sent([3, 4, 17, STEPS]) == sent([STEPS]) == promptly


@pytest.mark.parametrize("tokens", [20, 80])
def test_streaming_copies_a_token_a_fixed_number_of_times(tiny, monkeypatch, tokens):
    """SE-2: a token is copied once for the stream and once for the record, however many there are."""
    requests, make = [], InputProcessor.make

    def counting(*args: object, **kwargs: object) -> Request:
        request = make(*args, **kwargs)
        request.output.generated_log_probs = CountingList()
        requests.append(request)
        return request

    monkeypatch.setattr(InputProcessor, "make", counting)
    body = {"prompt": [9, 8, 7], "temperature": 0, "max_tokens": tokens, "stream": True, "logprobs": 1}
    answer = tiny.http.post("/v1/completions", json=body).text
    lines = [line.removeprefix("data: ") for line in answer.splitlines() if line]
    assert lines[-1] == "[DONE]"
    log_probs = [one for line in lines[:-1] for one in json.loads(line)["choices"][0]["logprobs"]["token_logprobs"]]
    (request,) = requests
    copied = request.output.generated_log_probs.copied
    assert copied <= 2 * tokens
    assert len(log_probs) == len(request.output.generated_log_probs) == tokens
