"""Servers on a loopback port in this process, and clients of them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import importlib
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import openai
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from megatron_ext.config import BatchingConfig, CacheConfig, ServerLimits, SourceConfig
from megatron_ext.mcore import platform
from megatron_ext.mcore.adapter import InferenceEngine
from megatron_ext.mcore.assemble import build_engine
from megatron_ext.models.load import load_model
from megatron_ext.server.run import bind, build_server
from megatron_ext.server.serving import Serving
from megatron_ext.text.tokenizer_files import ChatTemplates
from tests.unit_tests.support.holding import PATIENCE, held_steps
from tests.unit_tests.support.models import HYBRID, build_slow_decay
from tests.unit_tests.support.tokenizers import PieceTokenizer

for name in ("httpx", "httpx2"):  # openai's client has the one or the other
    with contextlib.suppress(ImportError):
        transports = importlib.import_module(f"{name}._transports.default")
        # Reading the authorities' certificates takes 20 ms for each client, and no test speaks TLS.
        transports.create_ssl_context = functools.cache(transports.create_ssl_context)

TWO_LAYERS = dataclasses.replace(HYBRID, hybrid_override_pattern="M*")
TALKING = dataclasses.replace(TWO_LAYERS, vocab_size=4096, max_position_embeddings=4096)
PATIENT = ServerLimits(header_timeout=PATIENCE, grammar_timeout=PATIENCE)  # the defaults are 10 s and 5 s


@dataclass
class LiveServer:
    """A server in a thread of its own."""

    serving: Serving
    url: str = ""
    loop: asyncio.AbstractEventLoop | None = None
    _ready: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._server = build_server(self.serving, self._on_ready)
        listener = bind("127.0.0.1", 0)
        self.thread = threading.Thread(target=self._server.run, kwargs={"sockets": [listener]}, daemon=True)
        self.thread.start()
        assert self._ready.wait(PATIENCE), "the server did not start"
        self.http = httpx.Client(base_url=self.url, timeout=PATIENCE)

    def _on_ready(self, url: str) -> None:
        self.url, self.loop = url, asyncio.get_running_loop()
        self._ready.set()

    @property
    def engine(self) -> InferenceEngine:
        return self.serving.engine.inference_engine

    def client(self, **options: object) -> openai.OpenAI:
        return openai.OpenAI(**self._options(options))

    def async_client(self, **options: object) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(**self._options(options))

    def _options(self, options: dict) -> dict:
        key = self.serving.settings.api_key or "unused"
        return {"base_url": f"{self.url}/v1", "api_key": key, "max_retries": 0, "timeout": PATIENCE} | options

    def in_engine_thread(self, function: Callable, *arguments: object):
        """Call something between two steps."""
        return self.serving.requests.client.call(function, *arguments).result(PATIENCE)

    def held(
        self, requests: int | None = None, tokens: int = 1
    ) -> contextlib.AbstractContextManager[contextlib.ExitStack]:
        """Block during which requests in progress stay in progress; see `held_steps`."""
        return held_steps(self.serving.requests.client, requests, tokens)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < deadline, "it does not come true"
            time.sleep(0.005)

    def check_idle(self) -> None:
        """Check that after the last request has ended all resources are free."""
        self.wait_until(lambda: self.serving.requests.living == 0)
        self.in_engine_thread(self._check_idle)

    def _check_idle(self) -> None:
        engine, scheduler = self.engine, self.engine.core.scheduler
        engine.check()
        assert not engine.has_unfinished_requests()
        assert scheduler.cache.use().blocks_in_use == 0
        assert scheduler.running_slots.free_count == scheduler.running_slots.total
        if scheduler.cache.states is not None:
            assert scheduler.cache.states.obtainable_count == scheduler.cache.states.total

    def use_template(self, monkeypatch: pytest.MonkeyPatch, template: str) -> None:
        """Render chats with another template, up to the end of the patch.

        The end of a turn is read from the server's own template before, since the server keeps it for later chats.
        """
        assert self.serving.chat_format.end_of_turn is not None
        monkeypatch.setattr(self.serving.tokenizer, "_templates", ChatTemplates.only(template, Path()))

    def reset_cache(self) -> None:
        self.check_idle()
        self.in_engine_thread(self.engine.reset_prefix_cache)

    def metric(self, name: str, **labels: str) -> float:
        """A sample of /metrics, by Prometheus' own parser."""
        samples = [
            sample.value
            for family in text_string_to_metric_families(self.http.get("/metrics").text)
            for sample in family.samples
            if sample.name == f"megatron_ext_{name}" and sample.labels.items() >= labels.items()
        ]
        (value,) = samples
        return value

    def stop(self) -> None:
        self.http.close()
        self._server.should_exit = True
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive(), "the server does not stop"


def read_all(client: socket.socket) -> bytes:
    """Until the server closes."""
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while part := client.recv(65536):
            parts.append(part)
    return b"".join(parts)


def tiny_engine(
    *, tokenizer: object | None = None, cache: CacheConfig | None = None, **batching: object
) -> InferenceEngine:
    """A random hybrid model whose tokens read as "<17>"."""
    return build_engine(
        build_slow_decay(TWO_LAYERS),
        TWO_LAYERS,
        tokenizer or PieceTokenizer(TWO_LAYERS.vocab_size),
        BatchingConfig(**({"block_size": 16, "block_count": 200, "max_requests": 8} | batching)),
        cache or CacheConfig(snapshot_slots=16),
        dtype=torch.float32,
    )


def embedded_engine(
    max_sequence_length: int | None = None, *, is_whole: bool = False, block_count: int = 400, **cache: object
) -> InferenceEngine:
    """The tokenizer and the template of the package's model around two random layers, which take a third of its time.

    Blocks are small enough for short conversations.

    Args:
        max_sequence_length: Of prompt and answer.
        is_whole: Whether the model is the package's own.
        block_count: Blocks of 16 tokens.
        cache: Settings of the cache.
    """
    platform.initialize()
    loaded = load_model(SourceConfig(), {})
    config = loaded.config if is_whole else TALKING
    longest = {} if max_sequence_length is None else {"max_sequence_length": max_sequence_length}
    batching = BatchingConfig(block_size=16, block_count=block_count, max_requests=8, **longest)
    return build_engine(
        loaded.model if is_whole else build_slow_decay(config),
        config,
        loaded.tokenizer,
        batching,
        CacheConfig(**({"snapshot_slots": 32} | cache)),
        dtype=loaded.dtype if is_whole else torch.float32,
    )
