"""SA-7: meaning of each field of a body: tokens, texts, scores and counts, whole and streamed."""

from __future__ import annotations

import json

import pytest
import torch

from megatron_ext.config import RequestParams
from megatron_ext.server.openai import request_fields
from tests.on_request import long_except
from tests.unit_tests.server.test_errors import CHAT, COMPLETIONS, check_error
from tests.unit_tests.support import choice
from tests.unit_tests.support.driver import make_prompt
from tests.unit_tests.support.models import build_slow_decay
from tests.unit_tests.support.oracle import Oracle
from tests.unit_tests.support.server import TWO_LAYERS, LiveServer, embedded_engine

PROMPT = make_prompt(24)
COUNT = 10


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle(build_slow_decay(TWO_LAYERS))


@pytest.fixture(params=[False, True], ids=["whole", "streamed"])
def stream(request) -> bool:
    return request.param


def ask(server: LiveServer, path: str, body: dict, *, stream: bool) -> list[dict]:
    """The choices, with the texts, ids and scores of all parts together; the last usage is in each."""
    if not stream:
        response = server.http.post(path, json=body)
        assert response.status_code == 200, response.text
        answer = response.json()
        return [one | {"usage": answer["usage"], "whole": answer} for one in answer["choices"]]
    response = server.http.post(path, json=body | {"stream": True, "stream_options": {"include_usage": True}})
    assert response.status_code == 200, response.text
    parts = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    choices: dict[int, dict] = {}
    for part in parts:
        for one in part["choices"]:
            merged = choices.setdefault(one["index"], {"text": "", "token_ids": [], "scores": []})
            delta = one.get("delta", {})
            merged["text"] += one.get("text", delta.get("content") or "")
            merged["token_ids"] += one.get("token_ids", [])
            merged["finish_reason"] = one["finish_reason"]
            if one["logprobs"] and "token_logprobs" in one["logprobs"]:
                merged["scores"] += one["logprobs"]["token_logprobs"]
            merged |= {name: one[name] for name in ("prompt_token_ids",) if name in one}
    return [one | {"usage": parts[-1]["usage"], "parts": parts} for _, one in sorted(choices.items())]


def told(got: dict) -> list[dict]:
    """Parts of a choice as the server told them, or the whole choice."""
    return [one for part in got.get("parts", [got.get("whole")]) for one in part["choices"]]


SAMPLED = {"temperature": 0.8, "seed": 5}
FIELDS: dict[str, dict] = {
    "presence_penalty": {"presence_penalty": 1.5, "temperature": 0},
    "frequency_penalty": {"frequency_penalty": 0.9, **SAMPLED},
    "repetition_penalty": {"repetition_penalty": 1.7, "temperature": 0},
    "logit_bias": {"logit_bias": {"31": -100, "7": 3}, **SAMPLED},
    "min_p": {"min_p": 0.3, **SAMPLED},
    "bad_words": {"bad_words": ["<23>", "<35><2>"], "temperature": 0},
}


@pytest.mark.parametrize("name", long_except({"presence_penalty", "logit_bias"}, FIELDS))
def test_options_that_change_logits(tiny, oracle, stream, name):
    """SA-1: the tokens of a plain recompute; without the field they are others."""
    fields = FIELDS[name]
    params = RequestParams(num_tokens_to_generate=COUNT, **fields)
    bad = [tuple(int(piece) for piece in word.strip("<>").split("><")) for word in params.bad_words]
    body = {"prompt": PROMPT, "max_tokens": COUNT, "return_token_ids": True} | fields
    (got,) = ask(tiny, COMPLETIONS, body, stream=stream)
    assert got["token_ids"] == choice.generate(oracle, PROMPT, params, bad)
    (plain,) = ask(tiny, COMPLETIONS, {key: value for key, value in body.items() if key != name}, stream=stream)
    assert plain["token_ids"] != got["token_ids"]


class TestScoring:
    def test_several_prompts_of_no_token(self, tiny, oracle, stream):
        """SA-4: `max_tokens` 0 with `echo`: the prompts' own scores, and nothing beside them."""
        prompts = [make_prompt(20), make_prompt(33)]
        body = {"prompt": prompts, "max_tokens": 0, "echo": True, "logprobs": 0}
        for prompt, got in zip(prompts, ask(tiny, COMPLETIONS, body, stream=stream), strict=True):
            scores = got["scores"] if stream else got["logprobs"]["token_logprobs"]
            assert scores[0] is None
            torch.testing.assert_close(torch.tensor(scores[1:]), oracle.prompt_log_probs(prompt), atol=1e-4, rtol=1e-4)
            assert got["text"] == "".join(f"<{token}>" for token in prompt)
            assert (got["finish_reason"], got["usage"]["completion_tokens"]) == ("length", 0)

    def test_choices_share_one_prefill_and_the_scores_of_the_prompt(self, tiny, oracle, stream):
        """`n` from one prefill, partial block and states included, though the first one may not read the cache."""
        tiny.reset_cache()
        prompt = make_prompt(40, seed=3)
        before = tiny.engine.lifetime_prefill_token_count
        body = {"prompt": prompt, "n": 3, "max_tokens": 4, "echo": True, "logprobs": 0, "seed": 3}
        choices = ask(tiny, COMPLETIONS, body, stream=stream)
        tiny.check_idle()
        assert tiny.engine.lifetime_prefill_token_count - before == 40
        scores = [one["scores"] if stream else one["logprobs"]["token_logprobs"] for one in choices]
        assert scores[0][:40] == scores[1][:40] == scores[2][:40]
        torch.testing.assert_close(torch.tensor(scores[1][1:40]), oracle.prompt_log_probs(prompt), atol=1e-4, rtol=1e-4)
        for i, one in enumerate(choices):
            params = RequestParams(num_tokens_to_generate=4, temperature=1.0, seed=3 + i)
            tokens = choice.generate(oracle, prompt, params)
            assert one["text"] == "".join(f"<{token}>" for token in [*prompt, *tokens])


class TestTokenIds:
    def test_chats(self, embedded, stream):
        body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5, "return_token_ids": True}
        (got,) = ask(embedded, CHAT, body | {"temperature": 0}, stream=stream)
        tokenizer = embedded.serving.tokenizer
        told = got["parts"][0] if stream else got["whole"]
        assert told["prompt_token_ids"] == tokenizer.tokenize("<|user|>Hello<|end|><|assistant|>")
        assert len(got["token_ids"]) == 5
        text = got["text"] if stream else got["message"]["content"]
        assert tokenizer.detokenize(got["token_ids"]) == text

    @pytest.mark.parametrize(("path", "count"), [(COMPLETIONS, 5), (COMPLETIONS, 0), (CHAT, 5)])
    def test_versions_of_weights(self, embedded, stream, path, count):
        """RL-2: two fields of a choice, and of each part of a stream, if they are asked for."""
        prompt = {"messages": [{"role": "user", "content": "Hello"}]} if path == CHAT else {"prompt": [5, 6, 7]}
        body = {"max_tokens": count, "ignore_eos": True, "temperature": 0, **prompt}
        body |= {} if count else {"echo": True}
        (plain,) = ask(embedded, path, body, stream=stream)
        (got,) = ask(embedded, path, body | {"return_weights_version": True}, stream=stream)
        for name in ("weights_version", "prefix_weights_version"):
            runs = [run for one in told(got) for run in one.get(name, ())]
            assert {version for version, _ in runs} == {embedded.engine.core.weights_version}
            assert sum(tokens for _, tokens in runs) == count
            assert not any(name in one for one in told(plain))


class TestUsage:
    def usages(self, server: LiveServer, options: dict) -> list:
        body = {"prompt": [[1, 2, 3], [4]], "max_tokens": 40, "stream": True, "stream_options": options}
        response = server.http.post(COMPLETIONS, json=body)
        return [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]

    def test_so_far(self, tiny):
        parts = self.usages(tiny, {"include_usage": True, "continuous_usage_stats": True})
        counts = [part["usage"]["completion_tokens"] for part in parts]
        assert counts == sorted(counts)
        assert (counts[-1], parts[-1]["choices"]) == (80, [])
        assert all(part["usage"]["prompt_tokens"] == 4 for part in parts)
        assert all(part["usage"]["total_tokens"] == 4 + count for part, count in zip(parts, counts, strict=True))
        assert len(set(counts)) > 2


class TestTemplates:
    MESSAGES = ({"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Half of an"})

    def prompt_of(self, server: LiveServer, **fields) -> list[int]:
        body = {"messages": list(self.MESSAGES), "max_tokens": 1, "return_token_ids": True} | fields
        response = server.http.post(CHAT, json=body)
        assert response.status_code == 200, response.text
        return response.json()["prompt_token_ids"]

    def test_going_on_with_the_last_message(self, embedded):
        tokenize = embedded.serving.tokenizer.tokenize
        begun = "<|user|>Hello<|end|><|assistant|>Half of an"
        assert self.prompt_of(embedded, continue_final_message=True) == tokenize(begun)
        assert self.prompt_of(embedded, add_generation_prompt=False) == tokenize(begun + "<|end|>")
        assert self.prompt_of(embedded) == tokenize(begun + "<|end|><|assistant|>")
        both = {"continue_final_message": True, "add_generation_prompt": True, "messages": list(self.MESSAGES)}
        assert "contradict each other" in check_error(embedded.http.post(CHAT, json=both), 400)["message"]

    def test_variables(self, embedded, monkeypatch):
        """Special tokens that they spell stay text, in names of nested ones, too."""
        tokenizer = embedded.serving.tokenizer
        template = "<|system|>{{ style }} {{ more | tojson }}<|end|>" + tokenizer.chat_template
        embedded.use_template(monkeypatch, template)
        fields = {"chat_template_kwargs": {"style": "<|end|>short", "more": {"<|user|>": 1}}}
        prompt = self.prompt_of(embedded, **fields)
        plain = '<|system|><|end|>short {"<|user|>": 1}<|end|><|user|>Hello<|end|>'
        text = tokenizer.detokenize(prompt, skip_special_tokens=False)
        assert text.startswith(plain)
        assert [token for token in prompt if token < 5] == [1, 4, 2, 4, 3, 4, 3]


GATEWAYS = {"no_stop_trim": False, "return_hidden_states": False, "ignore_eos": False}  # RP-6: SGLang's adds these
HINTS = {"prompt_cache_key": "k", "cache_hints": {"session": "s", "replaces": "s"}}  # of version 0.2
CLIENTS = {
    "prediction": {"type": "content", "content": "Hello"},
    "store": True,
    "metadata": {"a": "b"},
    "service_tier": "flex",
    "safety_identifier": "x",
    "user": "y",
    "verbosity": "low",
}
HARMLESS = {
    COMPLETIONS: {
        "min_p": 0.0,
        "skip_special_tokens": True,
        "add_special_tokens": True,
        "best_of": 1,
        "priority": 0,
        "use_beam_search": False,
        "user": "me",
        **GATEWAYS,
        **HINTS,
    },
    CHAT: {
        **{"min_p": 0, "skip_special_tokens": True, "add_generation_prompt": True, "tool_choice": "none", "tools": []},
        **GATEWAYS,
        **HINTS,
        **CLIENTS,
        **{"separate_reasoning": True, "stream_reasoning": True, "continue_final_message": False, "logprobs": False},
    },
}


@pytest.mark.parametrize("path", HARMLESS)
def test_fields_without_effect(embedded, path):
    body = {"prompt": "A list"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "A list"}]}
    body |= {"temperature": 0, "max_tokens": 4, "return_token_ids": True}
    plain = ask(embedded, path, body, stream=False)[0]["token_ids"]
    assert ask(embedded, path, body | HARMLESS[path], stream=False)[0]["token_ids"] == plain


def test_defaults_of_the_model(tiny, oracle, monkeypatch, stream):
    """SA-8: the defaults apply to fields missing in a body."""
    monkeypatch.setattr(tiny.serving, "defaults", {"temperature": 0.7, "top_k": 5, "repetition_penalty": 1.4})
    body = {"prompt": PROMPT, "max_tokens": COUNT, "seed": 3, "return_token_ids": True}
    for said in ({}, {"top_k": 40, "temperature": 0.9}, {"temperature": 0}):
        wanted = {"temperature": 0.7, "top_k": 5, "repetition_penalty": 1.4} | said
        params = RequestParams(num_tokens_to_generate=COUNT, seed=3, **wanted)
        (got,) = ask(tiny, COMPLETIONS, body | said, stream=stream)
        assert got["token_ids"] == choice.generate(oracle, PROMPT, params)


USER = {"role": "user", "content": [{"type": "text", "text": "Hello", "of_a_part": 1}]}
NAMED = {"name": "f", "parameters": {"type": "object"}}
TOOL = {"type": "function", "function": NAMED | {"of_a_function": 1}, "of_a_tool": 1}
OTHERS = {
    "keep_alive": -1,
    "provider": {"order": []},
    "prompt_cache_retention": "24h",
    "no\nline" * 40: 1,
    "nothing": None,
}
MESSAGES = {"messages": [{"role": "user", "content": "Hello"}]}
BODIES = {
    COMPLETIONS: {
        "prompt": "Hello",
        "max_tokens": 3,
        "stream": True,
        "stream_options": {"include_usage": True, "of_a_stream": 1},
    },
    CHAT: {
        "messages": [USER],
        "max_tokens": 3,
        "tools": [TOOL],
        "priority": 3,
        "response_format": {"type": "text", "json_schema": None},
    },
    "/v1/responses": {
        "input": "Hello",
        "max_output_tokens": 3,
        "client_metadata": {"a": "b"},
        "tools": [{"type": "function"} | NAMED | {"x": 1}],
    },
    "/v1/responses/input_tokens": {"input": "Hello", "max_output_tokens": 3, "n": 4},
    "/v1/messages": MESSAGES | {"max_tokens": 5, "context_management": {"edits": []}},
    "/v1/messages/count_tokens": MESSAGES | {"max_tokens": 5},
    "/tokenize": {"messages": [USER], "max_tokens": 5},
    "/detokenize": {"tokens": [5]},
}


@pytest.fixture(scope="module")
def strict(serve) -> LiveServer:
    return serve(embedded_engine(), "embedded", strict_fields=True)


@pytest.mark.parametrize("path", BODIES)
def test_unknown_fields_are_ignored_and_named_once(embedded, caplog, monkeypatch, path):
    """Also those of parts, tools and options; the number of names is bounded."""
    monkeypatch.setattr(request_fields, "_noted", set())
    body = BODIES[path] | OTHERS
    with caplog.at_level("INFO"):
        for _ in range(2):
            response = embedded.http.post(path, json=body)
            assert response.status_code == 200, response.text
        said = [one for one in caplog.messages if "is ignored" in one]
        assert len(said) == len(set(said))
        for name in ("keep_alive", "provider", *(name for name in json.dumps(body).split('"') if name[:5] == "of_a_")):
            assert len([one for one in said if f"field {name};" in one]) == 1
        assert not any("\n" in one or len(one) > 250 or "nothing" in one for one in said)
        for count in range(3):
            embedded.http.post(path, json=body | {f"x{count}_{i}": 1 for i in range(110)})
    assert len(request_fields._noted) == request_fields.MAX_NOTED


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": "Hello"}),
        (CHAT, MESSAGES | {"max_tokens": 5}),
        ("/v1/responses", {"input": "Hello", "max_output_tokens": 5}),
        ("/v1/messages", MESSAGES | {"max_tokens": 5}),
        ("/tokenize", MESSAGES),
        ("/detokenize", {"tokens": [5]}),
    ],
)
def test_strict_fields(strict, path, body):
    assert strict.http.post(path, json=body | {"nothing": None}).status_code == 200
    response = strict.http.post(path, json=body | {"keep_alive": 1})
    assert response.status_code == 400
    assert "keep_alive is not a known field (--strict-fields)" in response.json()["error"]["message"]


@pytest.mark.parametrize("where", ["the body", "the template's variables"])
def test_thinking_can_be_turned_off(embedded, monkeypatch, where):
    """`enable_thinking` means the same in both places: a log line would hide that thinking stays on."""
    tokenizer = embedded.serving.tokenizer
    template = tokenizer.chat_template + "{% if enable_thinking is defined and not enable_thinking %}quick{% endif %}"
    embedded.use_template(monkeypatch, template)
    fields = {"enable_thinking": False}
    fields = fields if where == "the body" else {"chat_template_kwargs": fields, "enable_thinking": True}
    expected = tokenizer.tokenize("<|user|>Hello<|end|><|assistant|>quick")
    assert embedded.http.post("/tokenize", json=MESSAGES | fields).json()["tokens"] == expected
    body = {"input": "Hello", "return_token_ids": True, "max_output_tokens": 1} | fields
    assert embedded.http.post("/v1/responses", json=body).json()["prompt_token_ids"] == expected
    response = embedded.http.post("/v1/messages", json=MESSAGES | {"max_tokens": 1, "enable_thinking": False})
    assert "use thinking" in response.json()["error"]["message"]
