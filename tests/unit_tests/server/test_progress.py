"""Updates of streamed requests to the event loop, each only as large as its new tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from megatron_ext.engine.input_processor import InputProcessor
from megatron_ext.scheduling.request import Request


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
