"""Servers that live as long as a module's tests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

from megatron_ext.config import ServerConfig
from megatron_ext.mcore.adapter import InferenceEngine
from megatron_ext.models.llm_engine import LLMEngine
from megatron_ext.server.serving import Serving
from megatron_ext.text.tokenizer_files import ChatTemplates
from tests.unit_tests.support.agent_loop import THINKING_TEMPLATE
from tests.unit_tests.support.server import PATIENCE, PATIENT, LiveServer, embedded_engine, tiny_engine


@pytest.fixture(scope="module")
def serve() -> Iterator[Callable[..., LiveServer]]:
    """A function: starts a server, which stops with the module."""
    servers = []

    def start(engine: InferenceEngine | LLMEngine, model: str = "tiny", **settings: object) -> LiveServer:
        engine = engine if isinstance(engine, LLMEngine) else LLMEngine(engine)
        config = ServerConfig(**({"shutdown_timeout": 5.0, "limits": PATIENT} | settings))
        servers.append(LiveServer(Serving(engine, model, config)))
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


@pytest.fixture(scope="module")
def thinker(serve) -> LiveServer:
    """Server of the embedded model, with a template that thinks."""
    engine = embedded_engine(explain_prefix_cache=True)
    engine.controller.tokenizer._templates = ChatTemplates.only(THINKING_TEMPLATE, Path())
    return serve(engine, "embedded")


class Prescribed:
    """Tokens of all answers, and a gate that holds them back after some."""

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids = ids
        self.held_after = len(ids)
        self.gate = threading.Event()

    def choose(self, logits, step) -> torch.Tensor:
        options = [row.sampling.logits_options for row in step.sampling]
        made = [len(one.tokens) - one.prompt_length for one in options]
        if max(made) >= self.held_after:
            assert self.gate.wait(PATIENCE)
        return torch.tensor([self._ids[count] for count in made])


@pytest.fixture
def prescribe(monkeypatch) -> Callable[[LiveServer, str], Prescribed]:
    """A function: from now on every answer is this text, through the engine's tokens.

    Requests need a penalty or a bias, so that steps say what was generated.
    """

    def say(server: LiveServer, text: str) -> Prescribed:
        prescribed = Prescribed([*server.serving.tokenizer.tokenize(text), server.serving.chat_format.end_of_turn])
        monkeypatch.setattr("megatron_ext.runner.step_output.next_tokens", prescribed.choose)
        return prescribed

    return say
