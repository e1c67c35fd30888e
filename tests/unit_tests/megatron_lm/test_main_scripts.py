"""MF-12: what inference scripts of Megatron's main use is there, with any version of megatron-core.

`main_scripts.yaml` has the names; test_real_scripts.py compares it with a checkout, and runs the scripts.
"""

from __future__ import annotations

import copy
import dataclasses
from functools import partial
from typing import Any

import pytest
from megatron.core.inference.sampling_params import SamplingParams

from megatron_ext.apis import MegatronAsyncLLM, MegatronLLM, ServeConfig
from megatron_ext.apis.inference_config import read_inference_config
from megatron_ext.errors import ConfigError
from megatron_ext.mcore.inference_request import to_request_params
from megatron_ext.megatron_lm.constructors import ScriptContext, ScriptController, ScriptEngine, ScriptWrapper
from megatron_ext.megatron_lm.substitution import substituted
from megatron_ext.text.tokenizer import NullTokenizer
from tests.unit_tests.megatron_lm import main_scripts
from tests.unit_tests.support import megatron_models

MAIN = main_scripts.read()
SIZES = {"max_sequence_length": 64, "block_size_tokens": 16, "buffer_size_gb": 0.01, "max_requests": 4}


def made(name: str, *bases: type) -> type[Any]:
    """Return a dataclass with the fields and defaults of one of main's."""
    fields = [
        (field, object, dataclasses.field(default_factory=partial(copy.copy, default)))
        for field, default in MAIN[name].items()
    ]
    return dataclasses.make_dataclass(name, fields, bases=bases)


def absent(found: object, *names: str) -> list[str]:
    return [one for name in names for one in MAIN[name] if not hasattr(found, one)]


@pytest.fixture(scope="module")
def model():
    with megatron_models.stand_ins():
        return megatron_models.build("llama")


class TestFields:
    def test_sampling_params_by_default(self):
        params = made("SamplingParams", SamplingParams)(top_k=1, num_tokens_to_generate=5)
        assert to_request_params(params, 3, 64).num_tokens_to_generate == 5

    def test_another_value_is_refused_by_name(self):
        params = made("SamplingParams", SamplingParams)(num_tokens_to_generate=5, do_kv_handoff=True)
        with pytest.raises(ConfigError, match="do_kv_handoff True is not a sampling parameter here"):
            to_request_params(params, 3, 64)

    def test_inference_config(self):
        config = made("InferenceConfig")
        assert read_inference_config(config()).settings["kv_cache_management_mode"] == "persist"
        with pytest.raises(ConfigError, match=r"InferenceConfig\.image_preprocessing_config 5: prompts are text"):
            read_inference_config(config(image_preprocessing_config=5))

    def test_serve_config(self):
        assert dataclasses.asdict(ServeConfig()) == MAIN["ServeConfig"]


def test_parts_by_hand(model):
    with substituted():
        context = ScriptContext(model.config, made("InferenceConfig")(**SIZES))
        wrapper = ScriptWrapper(model, context)
        engine = ScriptEngine(ScriptController(wrapper, NullTokenizer(megatron_models.VOCABULARY)), context)
        engine.add_request(0, "5 6 7", made("SamplingParams", SamplingParams)(num_tokens_to_generate=1, top_k=1))
        step = engine.step_modern()
        assert absent(engine, "engine") == absent(context, "context") == absent(engine.decode_only, "decode_only") == []
        assert context.kv_block_allocator.pool_size == engine.plan.world.blocks + 1
        assert set(MAIN["step"]) <= step.keys()
        (record,) = step["finished_request_records"]
        assert absent(record[0], "finished_request") == []


@pytest.mark.parametrize("kind", [MegatronLLM, MegatronAsyncLLM])
def test_the_high_level_interface(model, kind):
    config = made("InferenceConfig")(**SIZES)
    llm = kind(model=model, tokenizer=NullTokenizer(megatron_models.VOCABULARY), inference_config=config)
    try:
        assert absent(llm, "llm") == absent(llm.engine, "llm_engine") == absent(llm.context, "context") == []
        assert llm.context.kv_block_allocator.pool_size == llm.context.kv_block_allocator.total_count + 1
        (request,) = llm._generate(["5 6 7"], made("SamplingParams", SamplingParams)(num_tokens_to_generate=1, top_k=1))
        assert absent(request, "llm_request") == []
    finally:
        llm._close()
