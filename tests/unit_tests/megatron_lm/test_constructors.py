"""Constructors of Megatron's names: what they take, and what can be asked of them before there is an engine."""

from __future__ import annotations

import importlib
import importlib.util
import sys

import pytest
import torch
from megatron.core.inference.sampling_params import SamplingParams

from megatron_ext.errors import ConfigError
from megatron_ext.megatron_lm.constructors import ScriptContext, ScriptController, ScriptEngine, ScriptWrapper
from megatron_ext.megatron_lm.substitution import APIS, NAMES, substituted
from megatron_ext.text.tokenizer import NullTokenizer
from tests.unit_tests.support import megatron_models

SIZES = {"max_sequence_length": 64, "block_size_tokens": 16, "buffer_size_gb": 0.01, "max_requests": 4}


@pytest.fixture(scope="module")
def model():
    with megatron_models.stand_ins():
        return megatron_models.build("llama")


def engine_around(model, context: ScriptContext, **arguments: object) -> ScriptEngine:
    wrapper = ScriptWrapper(model, {"not": "used"}, inference_context=context)
    return ScriptEngine(ScriptController(wrapper, NullTokenizer(megatron_models.VOCABULARY)), context, **arguments)


class TestBeforeTheEngine:
    def test_unknown_arguments_are_named(self):
        with pytest.raises(TypeError, match="max_reqests"):
            ScriptContext(max_reqests=4)

    def test_arguments_that_cannot_be_honoured_are_named(self):
        with pytest.raises(ConfigError, match="unified_memory_level"):
            ScriptContext(**SIZES, unified_memory_level=1)


def test_several_ranks_are_refused(model, monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda *_: 2)
    with pytest.raises(ConfigError, match="2 ranks"):
        engine_around(model, ScriptContext(**SIZES))


def test_the_parts_have_the_attributes_of_the_engine(model):
    context = ScriptContext(**SIZES)
    with substituted():
        engine = engine_around(model, context, random_seed=3, inference_logging_step_interval=5)
        assert engine.context.max_sequence_length == context.max_sequence_length == 64
        assert engine.inference_logging_step_interval == 5
        assert context.block_allocator.active_count == engine.plan.world.blocks
        (record,) = engine.generate([megatron_models.PROMPT[:9]], SamplingParams(num_tokens_to_generate=2, top_k=1))
        assert record[0].generated_tokens == megatron_models.generate(model, megatron_models.PROMPT[:9], 2)[0]
        assert context.step_count == engine.step_count == 2
        context.reset()
        with pytest.raises(NotImplementedError, match=r"add_request\(request_id, prompt, sampling_params\)"):
            context.add_request(None)


def test_an_aborted_request_has_failed(model):
    """Upstream has no other status; events keep their names."""
    with substituted():
        engine = engine_around(model, ScriptContext(**SIZES))
        engine.add_request(5, [1, 2, 3], SamplingParams(num_tokens_to_generate=9))
        engine.step_modern()
        engine.abort_request(5)
        (record,) = engine.step_modern()["finished_request_records"]
    request = record.merge()
    assert (request.request_id, request.status.name, request.generated_length) == (5, "FAILED", 1)
    assert request.events[-1].type.name != "FINISH"


class TestSubstitution:
    def classes(self) -> dict[tuple[str, str], object]:
        return {
            (name, module): getattr(importlib.import_module(module), name)
            for name, (_, modules) in NAMES.items()
            for module in modules
        }

    def test_names_are_put_back(self):
        before = self.classes()
        with substituted():
            assert self.classes() == {(name, module): NAMES[name][0] for name, module in before}
        assert self.classes() == before
        assert not {one for one in before.values() if one.__module__.startswith("megatron_ext")}

    def test_the_high_level_interface_is_ours(self):
        name, ours = APIS
        existed = importlib.util.find_spec(name) is not None
        with substituted():
            from megatron.core.inference.apis import MegatronLLM
            from megatron.core.inference.apis.llm import MegatronLLM as SameMegatronLLM
            from megatron.core.inference.apis.serve_config import ServeConfig

            assert MegatronLLM.__module__.startswith(ours)
            assert ServeConfig.__module__.startswith(ours)
            assert SameMegatronLLM is MegatronLLM
        assert (name in sys.modules) == existed
        if existed:
            assert importlib.import_module(name).MegatronLLM is not MegatronLLM

    def test_engines_are_closed_at_the_end(self, model):
        """Only one engine can be attached to a model."""
        with substituted():
            first = engine_around(model, ScriptContext(**SIZES))
            with pytest.raises(ConfigError, match="attached"):
                engine_around(model, ScriptContext(**SIZES))
            (held,) = ScriptEngine.attached  # so that it is not freed, and closed by that, without a close
        with substituted():
            second = engine_around(model, ScriptContext(**SIZES))
        assert first.core is not second.core
        assert held not in ScriptEngine.attached
