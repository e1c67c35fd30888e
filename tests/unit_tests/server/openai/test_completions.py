"""`/v1/completions` with the real client, streamed and not."""

from __future__ import annotations

import json
import math

import pytest

from megatron_ext.config import CacheConfig, RequestParams
from tests.unit_tests.support.driver import make_prompt
from tests.unit_tests.support.server import LiveServer, tiny_engine

PROMPT = make_prompt(40, seed=3)


@pytest.fixture(scope="module")
def offline():
    """A function: what an engine without a server and without a cache gives for the same prompt and settings."""
    engine = tiny_engine()

    def generate(prompt, **params):
        (record,) = engine.generate([prompt], RequestParams(enable_prefix_caching=False, **params))
        return record

    return generate


def complete(server: LiveServer, *, stream: bool, prompt=PROMPT, **fields):
    """Texts by choice, finish reasons, usage and log-probs, however they came."""
    extra = {name: fields.pop(name) for name in list(fields) if name in EXTENSIONS}
    arguments = {"model": "tiny", "prompt": prompt, "temperature": 0, "extra_body": extra} | fields
    client = server.client()
    if not stream:
        answer = client.completions.create(**arguments)
        choices = sorted(answer.choices, key=lambda choice: choice.index)
        return Got(
            [choice.text for choice in choices],
            [choice.finish_reason for choice in choices],
            answer.usage,
            [choice.logprobs for choice in choices],
        )
    texts, reasons, usage, scores = {}, {}, None, {}
    for part in client.completions.create(**arguments, stream=True, stream_options={"include_usage": True}):
        usage = part.usage or usage
        for choice in part.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            if choice.finish_reason is not None:
                assert choice.index not in reasons, "a choice ends once"
                reasons[choice.index] = choice.finish_reason
            scores.setdefault(choice.index, []).append(choice.logprobs)
    order = sorted(texts)
    return Got([texts[i] for i in order], [reasons[i] for i in order], usage, [scores[i] for i in order])


EXTENSIONS = ("min_tokens", "top_k", "ignore_eos", "cache_salt", "enable_prefix_caching")


class Got:
    def __init__(self, texts, reasons, usage, scores):
        self.texts, self.reasons, self.usage, self.scores = texts, reasons, usage, scores

    @property
    def cached(self) -> int:
        return self.usage.prompt_tokens_details.cached_tokens


@pytest.fixture(params=[False, True], ids=["whole", "streamed"])
def stream(request) -> bool:
    return request.param


def test_the_text_is_the_engines(tiny, offline, stream):
    got = complete(tiny, stream=stream, max_tokens=20)
    assert got.texts == [offline(PROMPT, num_tokens_to_generate=20).generated_text]
    assert got.reasons == ["length"]
    assert (got.usage.prompt_tokens, got.usage.completion_tokens, got.usage.total_tokens) == (40, 20, 60)


def test_cached_tokens_are_the_skipped_ones(tiny, offline, stream):
    """EX-2: the second time the prompt is skipped up to its last snapshot; the text stays the same."""
    tiny.reset_cache()
    before = tiny.metric("prompt_tokens_skipped_total")
    first, second = (complete(tiny, stream=stream, max_tokens=4) for _ in range(2))
    assert (first.cached, second.cached) == (0, 32)
    assert first.texts == second.texts
    tiny.check_idle()
    assert tiny.metric("prompt_tokens_skipped_total") - before == 32
    reasons = second.usage.prompt_tokens_details.computed_tokens_by_reason
    assert reasons == {"partial_block": 8}


def test_choices_are_seeded_one_after_the_other(tiny, offline, stream):
    """Choice i is what seed + i gives; usage counts the prompt once."""
    got = complete(tiny, stream=stream, n=3, temperature=1.5, seed=11, max_tokens=12)
    expected = [offline(PROMPT, num_tokens_to_generate=12, temperature=1.5, seed=11 + i) for i in range(3)]
    assert got.texts == [record.generated_text for record in expected]
    assert len(set(got.texts)) == 3
    assert (got.usage.prompt_tokens, got.usage.completion_tokens) == (40, 36)


@pytest.mark.parametrize(
    ("fields", "params"),
    [
        ({"temperature": 1.5, "top_p": 0.5}, {"temperature": 1.5, "top_p": 0.5}),
        ({"temperature": 1.5, "top_k": 3}, {"temperature": 1.5, "top_k": 3}),
        ({"temperature": 1.5, "top_k": -1, "top_p": 1}, {"temperature": 1.5}),
        ({"temperature": 1.5, "top_p": 0}, {}),
        ({"temperature": None}, {"temperature": 1.0}),
    ],
    ids=str,
)
def test_sampling_fields(tiny, offline, fields, params):
    """OpenAI's temperature is 1 by default; its top_p 0 takes the best token."""
    got = complete(tiny, stream=False, seed=5, **fields)
    assert got.texts == [offline(PROMPT, num_tokens_to_generate=16, seed=5, **params).generated_text]


def test_stop_words(tiny, offline, stream):
    """The text ends before the word, also where the word lies across tokens and their text was held back."""
    tokens = offline(PROMPT, num_tokens_to_generate=20).generated_tokens
    text = "".join(f"<{token}>" for token in tokens)
    word = f"{tokens[6]}><{tokens[7]}"
    cut = text[: text.find(word)]
    got = complete(tiny, stream=stream, max_tokens=20, stop=[word, "never"])
    assert (got.texts, got.reasons) == ([cut], ["stop"])
    assert complete(tiny, stream=stream, max_tokens=20, stop=word).texts == [cut]


def test_log_probs(tiny, offline, stream):
    record = offline(PROMPT, num_tokens_to_generate=5, return_log_probs=True, top_n_logprobs=3)
    got = complete(tiny, stream=stream, max_tokens=5, logprobs=3)
    scores = joined(got.scores[0]) if stream else got.scores[0].model_dump()
    assert scores["tokens"] == [f"<{token}>" for token in record.generated_tokens]
    assert scores["token_logprobs"] == pytest.approx(record.generated_log_probs, abs=1e-4)
    for best, expected in zip(scores["top_logprobs"], record.generated_top_n_log_probs, strict=True):
        assert best == pytest.approx({f"<{token}>": value for token, value in expected.items()}, abs=1e-4)
    text = got.texts[0]
    for token, offset in zip(scores["tokens"], scores["text_offset"], strict=True):
        assert text[offset:].startswith(token)


def test_echo_with_log_probs_scores_the_prompt(tiny, offline, stream):
    """EX-5: the prompt is computed whole, and its own log-probs are right with the cache on."""
    expected = offline(PROMPT, num_tokens_to_generate=2, return_log_probs=True)
    complete(tiny, stream=stream)
    got = complete(tiny, stream=stream, max_tokens=2, echo=True, logprobs=0)
    scores = joined(got.scores[0]) if stream else got.scores[0].model_dump()
    assert got.cached == 0
    assert scores["tokens"] == [f"<{token}>" for token in [*PROMPT, *expected.generated_tokens]]
    assert scores["token_logprobs"][0] is None
    values = [*expected.prompt_log_probs, *expected.generated_log_probs]
    assert scores["token_logprobs"][1:] == pytest.approx(values, abs=1e-4)
    assert scores["text_offset"] == sorted(scores["text_offset"])


@pytest.mark.parametrize("prompt", ["naïve 世界 ok", "é", "a<|end|>\U0001f600\U0001f600b", "", "  two  spaces é "])
def test_offsets_are_positions_in_the_text(embedded, stream, prompt):
    """Tokens of one character have its position, tokens that the text does not show the position after them."""
    prompt = prompt or embedded.serving.tokenizer.tokenize("世<|user|>a")
    fields = {"echo": True, "logprobs": 0, "max_tokens": 8, "ignore_eos": True, "prompt": prompt, "model": "embedded"}
    got = [choice for part in parts_of(embedded, stream=stream, **fields) for choice in part["choices"]]
    text = "".join(choice["text"] for choice in got)
    scores = [choice["logprobs"] for choice in got]
    offsets = [offset for one in scores for offset in one["text_offset"]]
    tokens = [token for one in scores for token in one["tokens"]]
    assert offsets == sorted(offsets)
    assert offsets[0] == 0
    assert len(offsets) == len(tokens) > 8
    for token, offset in zip(tokens, offsets, strict=True):
        if "\ufffd" not in token and not token.startswith("<|"):
            assert text[offset:].startswith(token)
        assert "\ufffd" not in token or not text[offset].isascii()
    assert all(offset < len(text) for offset, token in zip(offsets, tokens, strict=True) if not token.startswith("<|"))


def parts_of(server: LiveServer, *, stream: bool, **fields) -> list[dict]:
    """The parts of an answer, which is one without a stream."""
    response = server.http.post("/v1/completions", json=fields | {"stream": stream})
    assert response.status_code == 200, response.text
    if not stream:
        return [response.json()]
    return [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]


def test_echo_with_kept_log_probs(serve, stream):
    """RL-10: the second request for the same log-probs skips what others skip."""
    server = serve(tiny_engine(cache=CacheConfig(prefix_cache_log_probs=True)))
    got = [complete(server, stream=stream, max_tokens=2, echo=True, logprobs=0) for _ in range(2)]
    assert [one.cached for one in got] == [0, (len(PROMPT) - 1) // 16 * 16]
    first, second = (joined(one.scores[0]) if stream else one.scores[0].model_dump() for one in got)
    assert second["tokens"] == first["tokens"]
    assert second["token_logprobs"][1:] == pytest.approx(first["token_logprobs"][1:], abs=1e-4)


def test_processed_log_probs(serve, offline, stream):
    """SA-16: of two tokens that are left; others that are listed have the least log-prob, and the prompt raw ones."""
    server = serve(tiny_engine(logprobs_mode="processed_logprobs"))
    fields = {"temperature": 0.8, "top_k": 2, "seed": 5, "max_tokens": 6, "logprobs": 4, "echo": True}
    got = complete(server, stream=stream, **fields)
    scores = joined(got.scores[0]) if stream else got.scores[0].model_dump()
    for log_prob, best in zip(scores["token_logprobs"][-6:], scores["top_logprobs"][-6:], strict=True):
        first, second, *others = sorted(best.values(), reverse=True)
        assert math.exp(first) + math.exp(second) == pytest.approx(1)
        assert others == [-9999.0] * 2
        assert log_prob in (first, second)
    prompt = offline(PROMPT, num_tokens_to_generate=1, return_log_probs=True).prompt_log_probs
    assert scores["token_logprobs"][1 : len(PROMPT)] == pytest.approx(prompt, abs=1e-4)


def joined(parts: list) -> dict:
    """The log-probs of a stream's parts, one after the other."""
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return {name: [item for part in parts for item in getattr(part, name)] for name in names}
