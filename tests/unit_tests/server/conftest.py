"""Servers that live as long as a module's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from megatron_ext.config import ServerConfig
from megatron_ext.mcore.adapter import InferenceEngine
from megatron_ext.models.llm_engine import LLMEngine
from megatron_ext.server.serving import Serving
from tests.unit_tests.support.server import LiveServer, embedded_engine, tiny_engine


@pytest.fixture(scope="module")
def serve() -> Iterator[Callable[..., LiveServer]]:
    """A function: starts a server, which stops with the module."""
    servers = []

    def start(engine: InferenceEngine | LLMEngine, model: str = "tiny", **settings: object) -> LiveServer:
        engine = engine if isinstance(engine, LLMEngine) else LLMEngine(engine)
        servers.append(LiveServer(Serving(engine, model, ServerConfig(**({"shutdown_timeout": 5.0} | settings)))))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


@pytest.fixture(scope="module")
def tiny(serve) -> LiveServer:
    return serve(tiny_engine())


@pytest.fixture(scope="module")
def embedded(serve) -> LiveServer:
    """Server whose tokenizer and template are the package's, and whose model writes anything."""
    return serve(embedded_engine(), "embedded")


@pytest.fixture(scope="module")
def trained(serve) -> LiveServer:
    """Server of the package's model, which ends its turns and writes what grammars leave open."""
    return serve(embedded_engine(is_whole=True), "embedded")
