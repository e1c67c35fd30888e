"""Text work kept off a server's engine thread: prompts arrive as ids, and texts are made on request."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence

import pytest

from megatron_ext.server.serving import SHORT_TEXT
from tests.unit_tests.support.server import TWO_LAYERS, LiveServer, tiny_engine
from tests.unit_tests.support.tokenizers import PieceTokenizer

PROMPT = [9, 8, 7, 6, 5]
TEXT = "".join(f"<{token}>" for token in PROMPT)


class CountingTokenizer(PieceTokenizer):
    """Notes which texts and ids it is given, and in which thread the prompt is read."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size)
        self.tokenized: Counter[str] = Counter()
        self.threads: list[str] = []
        self.readers: list[str] = []  # of texts

    def tokenize(self, text: str) -> list[int]:
        self.tokenized[text] += 1
        self.readers.append(threading.current_thread().name)
        return super().tokenize(text)

    def detokenize(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        if list(ids) == PROMPT:
            self.threads.append(threading.current_thread().name)
        return super().detokenize(ids, skip_special_tokens)


@pytest.fixture(scope="module")
def server(serve) -> LiveServer:
    return serve(tiny_engine(tokenizer=CountingTokenizer(TWO_LAYERS.vocab_size)))


@pytest.fixture
def tokenizer(server) -> CountingTokenizer:
    """The server's, which has seen nothing yet."""
    tokenizer = server.serving.tokenizer
    tokenizer.tokenized.clear()
    tokenizer.threads.clear()
    tokenizer.readers.clear()
    return tokenizer


def ask(server: LiveServer, prompt: str | list[int], **fields: object) -> list[str]:
    body = {"prompt": prompt, "temperature": 0, "max_tokens": 3} | fields
    return [choice["text"] for choice in server.http.post("/v1/completions", json=body).json()["choices"]]


def test_a_prompt_is_read_for_an_echo_only(server, tokenizer):
    """The prompt is detokenized once for all choices, by neither the engine's thread nor the event loop's."""
    (plain,) = ask(server, PROMPT)
    ask(server, TEXT, echo=True)
    assert tokenizer.threads == []
    assert ask(server, PROMPT, echo=True, n=2) == [TEXT + plain] * 2
    (name,) = tokenizer.threads
    assert not name.startswith("engine")
    assert name != server.thread.name


def test_short_texts_wait_for_no_thread(server, tokenizer):
    """OB-4: longer ones are beside the event loop, and none is with the engine's thread."""
    for text in ("<9>" * (SHORT_TEXT // 3), "<9>" * (SHORT_TEXT // 3 + 1)):
        ask(server, text)
    short, long = tokenizer.readers
    assert short == server.thread.name
    assert long != server.thread.name
    assert not long.startswith("engine")
