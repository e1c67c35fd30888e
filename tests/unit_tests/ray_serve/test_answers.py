"""SA-15 behind an ingress of Ray Serve, which remembers the answers of all replicas; Ray itself is not needed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from megatron_ext.config import ServerConfig
from megatron_ext.models.llm_engine import LLMEngine
from megatron_ext.server.serving import Serving
from tests.unit_tests.server.openai.test_answer_memory import (  # noqa: F401  # tests that run here, too
    CALL,
    FIRST,
    MESSAGES,
    MORE,
    SPELLED,
    Chats,
    said,
    test_a_retokenized_answer_is_explained,
    test_all_routes_agree,
    test_each_turn_resumes_where_the_last_one_ended,
)
from tests.unit_tests.support.chat_turns import ask, post, sent_back
from tests.unit_tests.support.fleet import Fleet
from tests.unit_tests.support.server import PATIENT, embedded_engine


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    engines = (LLMEngine(embedded_engine(explain_prefix_cache=True)) for _ in range(2))
    fleet = Fleet(
        *(Serving(one, "embedded", ServerConfig(limits=replace(PATIENT, responses_store_mb=1))) for one in engines)
    )
    yield fleet
    fleet.stop()


@pytest.fixture
def server(fleet) -> Fleet:
    return fleet


class TestAnswers:
    """The ingress remembers the answers of all replicas; these remember none."""

    @pytest.fixture(autouse=True)
    def restarted(self, fleet):
        fleet.restart()
        yield
        assert not len(fleet.reader.answers) + len(fleet.serving.answers)
        fleet.restart()  # other tests of this module ask the same, and may come later

    def tokens(self, fleet: Fleet, messages: list[dict], **fields: object) -> list[int]:
        return post(fleet, "/tokenize", {"messages": messages, **fields})["tokens"]

    def test_another_replica_answers(self, fleet, monkeypatch):
        choice, prompt, _ = ask(fleet, MESSAGES, 3)
        chat = [*MESSAGES, sent_back(choice), MORE]
        one, other = fleet.serving, fleet.reader
        monkeypatch.setattr(fleet, "serving", other)
        monkeypatch.setattr(fleet, "reader", one)
        assert self.tokens(fleet, chat)[: len(prompt) + 24] == prompt + choice["token_ids"]

    def test_an_ingress_without_the_answer_retokenizes(self, fleet):
        choice, _, _ = ask(fleet, MESSAGES, 3)
        chat = [*MESSAGES, sent_back(choice), MORE]
        known = self.tokens(fleet, chat)
        fleet.restart()
        again, ids, _ = ask(fleet, chat, 4)
        assert ids == self.tokens(fleet, chat, cache_salt="other") != known
        messages = [*chat, sent_back(again), MORE]
        assert self.tokens(fleet, messages)[: len(ids) + 24] == ids + again["token_ids"]

    def test_each_choice_and_streams(self, fleet):
        body = {"messages": MESSAGES, "n": 2, "max_tokens": 24, "seed": 3, "temperature": 1.0, "return_token_ids": True}
        whole = post(fleet, "/v1/chat/completions", body)
        assert len(fleet.answers) == 2
        for choice in whole["choices"]:
            known = whole["prompt_token_ids"] + choice["token_ids"]
            assert self.tokens(fleet, [*MESSAGES, sent_back(choice), MORE])[: len(known)] == known
        fleet.restart()
        answer = fleet.post("/v1/chat/completions", json=body | {"n": 1, "stream": True})
        assert answer.text.endswith("data: [DONE]\n\n")
        choice = whole["choices"][0]
        known = whole["prompt_token_ids"] + choice["token_ids"]
        assert self.tokens(fleet, [*MESSAGES, sent_back(choice), MORE])[: len(known)] == known

    def test_a_stored_response(self, fleet):
        """The replica that has stored it reads what continues it."""
        body = {"input": MESSAGES, "max_output_tokens": 24, "seed": 3, "return_token_ids": True}
        first = post(fleet, "/v1/responses", body)
        body = {"previous_response_id": first["id"], "input": "More.", "return_token_ids": True}
        found = post(fleet, "/v1/responses/input_tokens", body)["prompt_token_ids"]
        ((_, chat),) = fleet.answers._entries.items()
        assert found[: len(chat.ids)] == list(chat.ids)
        after = post(fleet, "/v1/responses", body | {"max_output_tokens": 2})
        assert after["usage"]["input_tokens"] == len(found)
        assert len(fleet.answers) == 2
