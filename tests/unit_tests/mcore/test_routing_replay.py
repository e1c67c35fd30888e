"""MF-1, MF-9: `--moe-enable-routing-replay` records the experts of every token, those of cached tokens included."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch import nn

from megatron_ext.config import ModelConfig
from megatron_ext.engine import output_processor
from megatron_ext.models.build import build_model
from megatron_ext.scheduling.chunk import Chunk
from megatron_ext.scheduling.record import RequestRecord, Status
from tests.unit_tests.support.caching import BLOCK, CachingDriver
from tests.unit_tests.support.drafters import Knowing, right_for_a_while
from tests.unit_tests.support.driver import Driver, make_prompt
from tests.unit_tests.support.hybrid_caching import HybridDriver
from tests.unit_tests.support.models import ATTENTION_ONLY, HYBRID, build_slow_decay

EXPERTS = {"num_experts": 8, "moe_ffn_hidden_size": 24, "moe_router_topk": 3}
GPT = dataclasses.replace(ATTENTION_ONLY, hybrid_override_pattern="*E*-*E", **EXPERTS)
SIGMOID = dataclasses.replace(
    HYBRID,
    hybrid_override_pattern="ME*EM-",
    moe_router_score_function="sigmoid",
    moe_router_enable_expert_bias=True,
    **EXPERTS,
)
PROMPT = make_prompt(3 * BLOCK + 5)


@pytest.fixture(scope="module")
def gpt() -> nn.Module:
    return build_model(GPT, device=torch.device("cpu"), seed=3)


@pytest.fixture(scope="module")
def hybrid() -> nn.Module:
    return build_slow_decay(SIGMOID)


def expected_experts(model: nn.Module, tokens: Sequence[int]) -> list[list[list[int]]]:
    """Experts of each token in each layer, in rising order, by a plain forward of the whole sequence."""
    maps = []
    hooks = [
        module.register_forward_hook(lambda _, inputs, output: maps.append(output[1]))
        for module in model.modules()
        if isinstance(module, TopKRouter)
    ]
    with torch.no_grad():
        model(torch.tensor([tokens]), torch.arange(len(tokens))[None], None)
    for hook in hooks:
        hook.remove()
    return [[layer[index].nonzero()[:, 0].tolist() for layer in maps] for index in range(len(tokens))]


def assert_recorded(record: RequestRecord, model: nn.Module, config: ModelConfig) -> None:
    tokens = [*record.prompt_tokens, *record.generated_tokens]
    found = record.routing_indices.to_lists()
    assert len(found) == len(record.routing_indices) == len(tokens) - 1
    assert [[sorted(row) for row in token] for token in found] == expected_experts(model, tokens)[:-1]
    assert {len(row) for token in found for row in token} == {config.moe_router_topk}
    assert {len(token) for token in found} == {config.hybrid_override_pattern.count("E")}


def caching(model: nn.Module, **changes: object) -> CachingDriver:
    return CachingDriver(model, GPT, moe_enable_routing_replay=True, **changes)


def chat(driver: Driver) -> None:
    """A prompt, it again, another end, and the next turn of the chat."""
    driver.add(0, PROMPT)
    driver.run()
    driver.add(1, PROMPT)
    driver.add(2, [*PROMPT[: 2 * BLOCK + 3], *make_prompt(9, seed=1)])
    driver.run()
    driver.add(3, [*PROMPT, *driver.records[0].generated_tokens, *make_prompt(9, seed=2)])
    driver.run()


@pytest.mark.parametrize("max_tokens", [400, 21])
def test_cached_tokens_have_their_rows(gpt: nn.Module, max_tokens: int) -> None:
    driver = caching(gpt, max_tokens=max_tokens)
    chat(driver)
    assert min(driver.skipped(1, 2, 3)) >= 2 * BLOCK
    for record in driver.records.values():
        assert_recorded(record, gpt, GPT)


@pytest.mark.parametrize("mode", ["kernel", "align"])
def test_hybrid_models(hybrid: nn.Module, mode: str) -> None:
    driver = HybridDriver(hybrid, SIGMOID, moe_enable_routing_replay=True, mode=mode)
    chat(driver)
    assert sum(driver.skipped(1, 2, 3)) > 0
    for record in driver.records.values():
        assert_recorded(record, hybrid, SIGMOID)


def test_preempted_requests(gpt: nn.Module) -> None:
    """Tokens that are computed again have one row each."""
    driver = caching(gpt, block_count=9, policy="ref_zero")
    for request_id in range(3):
        driver.add(request_id, make_prompt(2 * BLOCK + 1, seed=request_id), num_tokens_to_generate=3 * BLOCK)
    driver.run()
    assert any("EVICT" in driver.events(request_id) for request_id in range(3))
    for record in driver.records.values():
        assert_recorded(record, gpt, GPT)


def test_rejected_drafts_leave_no_rows(gpt: nn.Module) -> None:
    plain = caching(gpt)
    chat(plain)
    drafter = Knowing(right_for_a_while)
    drafter.truth = {i: [*one.prompt_tokens, *one.generated_tokens] for i, one in plain.records.items()}
    driver = caching(gpt, speculative_tokens=3, drafter=drafter)
    chat(driver)
    assert sum(one.draft_token_count > one.accepted_token_count for one in driver.records.values())
    for record in driver.records.values():
        assert_recorded(record, gpt, GPT)


def test_steps_are_eager(gpt: nn.Module, caplog: pytest.LogCaptureFixture) -> None:
    driver = caching(gpt, cuda_graph_impl="local")
    chat(driver)
    assert "every step is eager, since --moe-enable-routing-replay reads the experts" in caplog.text
    assert_recorded(driver.records[3], gpt, GPT)


def test_an_error_of_one_record_stays_with_its_request(gpt: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """SE-2: neighbours have their rows, and blocks that have none are computed again."""
    driver, note = caching(gpt), output_processor.note_rows

    def note_all_but_one(chunk: Chunk, *args: object) -> None:
        if chunk.request.request_id == 0:
            raise KeyError("a row")
        note(chunk, *args)

    monkeypatch.setattr(output_processor, "note_rows", note_all_but_one)
    driver.add(0, PROMPT)
    driver.add(1, make_prompt(len(PROMPT), seed=1))
    records = driver.run()
    assert (records[0].status, records[0].error) == (Status.FAILED, "KeyError: 'a row'")
    for request_id, skipped in ((2, 0), (3, 3 * BLOCK)):
        driver.add(request_id, PROMPT)
        assert driver.run()[request_id].skipped_prefill_token_count == skipped
    for request_id in (1, 2, 3):
        assert_recorded(driver.records[request_id], gpt, GPT)
