"""Names of Megatron's engine and context that its scripts read between steps, of 0.16.1 and 0.19."""

from __future__ import annotations

import dataclasses

from megatron.core.inference.sampling_params import SamplingParams

from tests.unit_tests.support.driver import make_prompt


def test_a_step_that_only_decodes_is_told_from_others(get_driver):
    engine = get_driver().engine
    assert (engine.is_decode_only, engine.decode_only.consumed, engine.decode_only.launched) == (False, None, None)
    engine.add_request(0, make_prompt(9), SamplingParams(num_tokens_to_generate=4, top_k=1))
    seen = []
    for request_id in (None, None, 1):
        if request_id is not None:
            engine.add_request(request_id, make_prompt(7), SamplingParams(num_tokens_to_generate=1, top_k=1))
        engine.step_modern()
        assert engine.is_decode_only == engine.decode_only.consumed
        seen.append(bool(engine.decode_only))
    assert seen == [False, True, False]
    engine.reset()
    assert engine.decode_only.consumed is None


def test_callers_get_the_presented_record(get_driver):
    """Records of steps, futures and `generate` have the parameters as they were given, and as they are served."""
    engine = get_driver().engine
    given = SamplingParams(num_tokens_total=12, num_tokens_to_generate=None, top_k=1)
    seen = []

    def present(record, asked):
        seen.append(asked)
        return dataclasses.replace(record, prompt_text="presented")

    engine.present = present
    future = engine.add_request(7, make_prompt(9), given)
    results = []
    while engine.has_unfinished_requests():
        results += engine.step_modern()["finished_request_records"]
    assert [(one.request_id, one.prompt_text) for one in results] == [(7, "presented")]
    assert future.result() is results[0]
    assert [(asked.given is given, asked.resolved.num_tokens_to_generate) for asked in seen] == [(True, 3)]
    assert [one.prompt_text for one in engine.generate([make_prompt(5)], given)] == ["presented"]
