"""A least number of tokens: until then neither the termination token nor a stop word ends a request."""

from __future__ import annotations

import pytest

from megatron_ext.config import RequestParams
from megatron_ext.runner import sampler
from tests.unit_tests.support.driver import Driver, make_prompt
from tests.unit_tests.support.models import HYBRID, build_slow_decay

PROMPT = make_prompt(20)


@pytest.fixture(scope="module")
def model():
    return build_slow_decay(HYBRID)


@pytest.fixture
def generate(model):
    """A function: the record of a request, with a neighbour in its batch."""

    def run(**params):
        driver = Driver(model, HYBRID)
        driver.add(0, PROMPT, **params)
        driver.add(1, make_prompt(9), termination_id=5)
        return driver.run()[0]

    return run


@pytest.fixture(scope="module")
def free(model):
    driver = Driver(model, HYBRID)
    driver.add(0, PROMPT, num_tokens_to_generate=20)
    return driver.run()[0].generated_tokens


@pytest.mark.parametrize("fewest", [0, 1, 3, 4, 5, 20])
def test_the_termination_token_is_ruled_out(generate, free, fewest):
    """The token would be the fourth; until then tokens are unchanged, and in its place the next best is chosen."""
    end = free[3]
    assert end not in free[:3]
    record = generate(num_tokens_to_generate=20, termination_id=end, min_tokens=fewest)
    tokens = record.generated_tokens
    assert tokens[:3] == free[:3]
    if fewest <= 3:
        assert (tokens, record.finish_reason) == (free[:4], "stop")
    else:
        assert end not in tokens[:fewest]
        assert len(tokens) > fewest or record.finish_reason == "length"


def test_as_many_as_there_may_be_are_as_many_as_there_are(generate, free):
    record = generate(num_tokens_to_generate=6, min_tokens=6, termination_id=free[3])
    assert (len(record.generated_tokens), record.finish_reason) == (6, "length")


def test_sampled_tokens_are_not_the_termination_token_either(generate):
    params = {"num_tokens_to_generate": 30, "temperature": 5.0, "seed": 1, "top_k": 4}
    plain = generate(**params).generated_tokens
    end = plain[2]
    assert generate(termination_id=end, **params).generated_tokens == plain[:3]
    longer = generate(termination_id=end, min_tokens=25, **params).generated_tokens
    assert end not in longer[:25]


def test_log_probs_are_those_of_the_raw_logits(generate, free):
    """The best token's log-prob is the one it has without the rule."""
    plain = generate(num_tokens_to_generate=4, top_n_logprobs=2)
    ruled = generate(num_tokens_to_generate=4, top_n_logprobs=2, termination_id=free[3], min_tokens=4)
    assert ruled.generated_top_n_log_probs[3] == pytest.approx(plain.generated_top_n_log_probs[3], abs=1e-4)
    assert ruled.generated_tokens[3] == list(plain.generated_top_n_log_probs[3])[1]


def test_stop_words_are_passed_over(generate, free):
    """The word lies before the least number, and again at its second occurrence it counts."""
    words = (f"<{free[2]}>",)
    assert len(generate(num_tokens_to_generate=20, stop_words=words).generated_tokens) == free.index(free[2]) + 1
    later = [i for i, token in enumerate(free) if token == free[2] and i >= 5]
    record = generate(num_tokens_to_generate=20, stop_words=words, min_tokens=5)
    assert len(record.generated_tokens) == (later[0] + 1 if later else 20)
    assert record.generated_text.startswith("".join(f"<{token}>" for token in free[:5]))


@pytest.mark.parametrize("end", [-1, 97, 10**6])
def test_a_termination_token_that_is_none_is_never_met(generate, free, end):
    record = generate(num_tokens_to_generate=5, min_tokens=5, termination_id=end)
    assert record.generated_tokens == free[:5]


def test_negative_control(generate, free, monkeypatch):
    monkeypatch.setattr(sampler, "needs_processing", lambda _: False)
    record = generate(num_tokens_to_generate=20, termination_id=free[3], min_tokens=20)
    assert free[3] in record.generated_tokens[:20]


def test_megatrons_parameters_can_carry_it():
    from megatron.core.inference.sampling_params import SamplingParams

    from megatron_ext.mcore.inference_request import to_request_params

    params = SamplingParams(num_tokens_to_generate=8)
    params.add_attributes({"min_tokens": 4})
    assert to_request_params(params, 3, 100) == RequestParams(
        num_tokens_to_generate=8, min_tokens=4, temperature=params.temperature, top_k=params.top_k, top_p=params.top_p
    )
