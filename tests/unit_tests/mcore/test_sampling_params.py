"""Megatron's SamplingParams as ours: every field arrives, and lengths in all their spellings."""

from __future__ import annotations

import pytest
from megatron.core.inference.sampling_params import SamplingParams

from megatron_ext.config import RequestParams
from megatron_ext.errors import ConfigError
from megatron_ext.mcore.inference_request import to_request_params
from megatron_ext.mcore.versions import VERSION


def convert(params: SamplingParams | RequestParams | None, prompt: int = 10, longest: int = 64) -> RequestParams:
    return to_request_params(params, prompt, longest)


def test_defaults_are_megatrons():
    """Megatron samples at temperature 1 unless told otherwise; 30 tokens, on newer versions as many as fit."""
    count = 30 if VERSION < (0, 17) else 64 - 10
    assert convert(SamplingParams(), 10, 64) == RequestParams(temperature=1.0, num_tokens_to_generate=count)


def test_every_field_arrives():
    params = SamplingParams(
        temperature=0.7,
        top_k=5,
        top_p=0.9,
        return_log_probs=True,
        skip_prompt_log_probs=True,
        num_tokens_to_generate=12,
        termination_id=3,
        top_n_logprobs=2,
        stop_words=["a", "b"],
    )
    assert convert(params) == RequestParams(
        temperature=0.7,
        top_k=5,
        top_p=0.9,
        return_log_probs=True,
        skip_prompt_log_probs=True,
        num_tokens_to_generate=12,
        termination_id=3,
        top_n_logprobs=2,
        stop_words=("a", "b"),
    )


def test_attributes_that_callers_add():
    params = SamplingParams(top_k=1, num_tokens_to_generate=30)
    params.add_attributes({"seed": 7, "ignore_eos": True, "cache_salt": "tenant", "enable_prefix_caching": False})
    assert convert(params) == RequestParams(
        temperature=1.0, top_k=1, seed=7, ignore_eos=True, cache_salt="tenant", enable_prefix_caching=False
    )


def with_attributes(**attributes: object) -> SamplingParams:
    """Parameters with fields of newer versions, and with others."""
    params = SamplingParams(num_tokens_to_generate=5)
    params.add_attributes(attributes)
    return params


def test_fields_of_newer_versions():
    assert convert(with_attributes(detokenize_stop_sequence=True)).detokenize_stop_sequence
    plain = convert(with_attributes())
    assert convert(with_attributes(return_prompt_tokens=True, streaming=False, streaming_interval=7)) == plain


@pytest.mark.parametrize("given", [{"return_segments": True}, {"streaming": True}, {"min_length": 0}, {"eod_id": 153}])
def test_what_is_not_honoured_is_refused_by_name(given):
    (name,) = given
    with pytest.raises(ConfigError, match=rf"^{name} .*leave it out"):
        convert(with_attributes(**given))


class TestLength:
    def test_a_total_leaves_at_least_one(self):
        params = SamplingParams(num_tokens_to_generate=None, num_tokens_total=25)
        assert convert(params, prompt=24).num_tokens_to_generate == 1
        with pytest.raises(ConfigError, match=r"num_tokens_total 25 .* prompt of 25 tokens; give at least 26"):
            convert(params, prompt=25)

    def test_a_total_and_a_number_to_generate_contradict_each_other(self):
        with pytest.raises(ConfigError, match="num_tokens_total 25 and num_tokens_to_generate 30"):
            convert(SamplingParams(num_tokens_total=25, num_tokens_to_generate=30))

    @pytest.mark.parametrize("prompt", [63, 64, 100])
    def test_a_prompt_that_leaves_no_room_is_left_to_the_engine(self, prompt: int):
        """Such a prompt fails alone, like any that is too long; the parameters are valid."""
        assert convert(SamplingParams(num_tokens_to_generate=None), prompt, 64).num_tokens_to_generate == 1
