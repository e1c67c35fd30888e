"""Engines whose own layer of multi-token prediction drafts: nothing changes, and its logits are those of whole texts.

Verification hides wrong drafts, so tokens alone cannot show that a layer reads the right hidden states and keys.
"""

from __future__ import annotations

import dataclasses
import itertools
from functools import cache

import pytest
import torch
from torch import Tensor

from megatron_ext.config.speculation import SpeculationConfig
from megatron_ext.mcore import hidden_states
from megatron_ext.mcore.hidden_states import HiddenStates
from megatron_ext.mcore.layers.hybrid_model import HybridModel
from megatron_ext.speculation.drafter import DraftAsk
from tests.unit_tests.mcore.test_verification import chat
from tests.unit_tests.support.drafters import assert_same, assert_same_cache, caching
from tests.unit_tests.support.driver import Driver, assert_logits_close, make_prompt
from tests.unit_tests.support.models import CONFIGS, build_slow_decay

# Kind of the trunk -> layers that draft, of which at least one has keys or states.
LAYERS = {"hybrid": "M*-", "gated_delta_net": "M*", "mamba1": "M-", "short_conv": "M", "attention_only": "*-"}
MODES = ["kernel", "align", None]


@cache
def predicting(kind: str) -> HybridModel:
    """A model that repeats its input, as its layer of multi-token prediction expects it to do, mostly."""
    config = dataclasses.replace(
        CONFIGS[kind],
        untie_embeddings_and_output_weights=False,
        mtp_num_layers=1,
        mtp_use_repeated_layer=True,
        mtp_hybrid_override_pattern=LAYERS[kind],
    )
    model = build_slow_decay(config)
    width = config.hidden_size
    with torch.no_grad():
        weight = model.mtp.layers[0].eh_proj.weight
        weight[:, :width] += 2 * torch.eye(width)
        weight[:, width:] *= 0.5
    return model


def drafting(count: int) -> SpeculationConfig:
    return SpeculationConfig(speculative_method="mtp", num_speculative_tokens=count, speculative_adaptive=False)


class Watched(Driver):
    """Engine of which the logits of all drafts are kept, and whose drafter's pools are poisoned.

    Attributes:
        drafts: Of each computed chunk that is sampled from: request, position of its last token, its tokens, number of
            drafts among them, first position that the layer has read, logits [V].
    """

    def __init__(self, kind: str, count: int, mode: str | None, **settings: object) -> None:
        model = predicting(kind)
        super().__init__(model, CONFIGS[kind], cache=caching(mode), speculation=drafting(count), **settings)
        self.model, self.drafter = model, self.context.drafting._model
        self.drafts: list[tuple[int, int, tuple[int, ...], int, int, Tensor]] = []
        pools = self.drafter._context.allocated
        for pool in (pools.kv, self.drafter._hidden._rows):
            pool.fill_(torch.nan)
        for pool in (pools.live_states, pools.snapshots):
            if pool is not None:
                pool.conv.fill_(torch.nan), pool.ssm.fill_(torch.nan)
        compute = self.drafter.logits

        def logits(step, inputs):
            found = compute(step, inputs)
            sampled = [chunk for chunk in self._in_order(step) if chunk.sampling is not None]
            for chunk, row in zip(sampled, found, strict=True):
                given, name = inputs[chunk.request_id], chunk.request_id
                last = given.position + chunk.length - 1
                first = self.drafter._firsts[name]
                self.drafts.append((name, last, chunk.token_ids, given.drafts, first, row.clone()))
            return found

        self.drafter.logits = logits

    def _in_order(self, step):
        order = {name: number for number, name in enumerate(self.drafter._sampled)}
        return sorted((one for one in step.chunks if one.sampling), key=lambda one: order[one.request_id])


@cache
def plain(kind: str, mode: str | None) -> Driver:
    driver = Driver(predicting(kind), CONFIGS[kind], cache=caching(mode))
    chat(driver)
    return driver


def cases() -> list:
    """Every kind, mode and number of drafts; a few of them are quick."""
    found = []
    for (i, kind), count, (j, mode) in itertools.product(enumerate(LAYERS), range(1, 5), enumerate(MODES)):
        is_quick = count == 1 + i % 4 and j == i % 3
        marks = () if is_quick else (pytest.mark.long,)
        found.append(pytest.param(kind, count, mode, id=f"{kind}-{count}-{mode}", marks=marks))
    return found


@pytest.mark.parametrize(("kind", "count", "mode"), cases())
def test_nothing_changes(kind, count, mode):
    """SP-10: tokens, logits, states, blocks, snapshots and counts are those without drafts."""
    driver = Watched(kind, count, mode)
    chat(driver)
    assert_same(driver, plain(kind, mode))
    if mode is not None:
        assert_same_cache(driver, plain(kind, mode))
    drafted, accepted = driver.scheduler.counters.drafted, driver.scheduler.counters.accepted
    assert 0 < accepted <= drafted
    assert len(driver.steps) == len(plain(kind, mode).steps) - accepted
    driver.drafter.check()


def whole(model: HybridModel, tokens: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states and embeddings of a whole text, [s, 1, h], and its rotary angles."""
    ids = torch.tensor([tokens])
    embedded = model.embedding(ids, torch.arange(len(tokens))[None])
    angles = model.rotary_pos_emb(len(tokens)) if model.position_embedding_type == "rope" else None
    return model.decoder(embedded, None, rotary_pos_emb=angles), embedded, angles


def expected(driver: Watched, texts: dict[int, list[int]]) -> list[Tensor]:
    """Logits of each kept draft, each computed from a whole text."""
    model, layer, found = driver.model, driver.model.mtp.layer_of(1), []
    outputs: dict[int, list[Tensor]] = {}  # after the last true token and after each draft
    guessed: dict[int, list[int]] = {}
    for name, last, tokens, drafts, first, _ in driver.drafts:
        if drafts == 0:
            outputs[name], guessed[name] = [], []
        else:
            guessed[name].append(tokens[-1])
        true = texts[name][: last + 1 - len(guessed[name])]
        hidden, embedded, angles = whole(model, [*true, *guessed[name]])
        before = torch.cat([hidden[: len(true) - 1], *outputs[name]])[first - 1 :]
        output = layer(before, embedded[first:], angles=None if angles is None else angles[: len(before)])[-1:]
        outputs[name].append(output)
        found.append(model.output_layer(output, weight=model.shared_embedding_or_output_weight())[0][0, 0])
    return found


def parted(driver: Watched) -> dict[int, list[int]]:
    """Two prompts that part right after a block, and a turn after the second; whole texts by request."""
    block = driver.context.block_size_tokens
    common = make_prompt(2 * block, seed=4)
    for name, prompt in enumerate(([*common, 5, 9, 11], [*common, 6, 2])):
        driver.add(name, prompt, num_tokens_to_generate=12, skip_prompt_log_probs=True)
        driver.run()
    second = driver.records[1]
    driver.add(
        2, [*second.prompt_tokens, *second.generated_tokens, 7], num_tokens_to_generate=12, skip_prompt_log_probs=True
    )
    records = driver.run()
    return {name: [*one.prompt_tokens, *one.generated_tokens] for name, one in records.items()}


@torch.inference_mode()
def worst(driver: Watched) -> float:
    """Largest difference of a draft's logits."""
    texts = parted(driver)
    assert driver.records[1].skipped_prefill_token_count == 2 * driver.context.block_size_tokens
    pairs = zip(driver.drafts, expected(driver, texts), strict=True)
    return max(float((one[-1] - other).abs().max()) for one, other in pairs)


@pytest.mark.parametrize("kind", LAYERS)
def test_logits_of_drafts(kind):
    """SP-10: of texts that share their blocks, from the first computed token on; across rejections."""
    driver = Watched(kind, 3, "kernel")
    assert worst(driver) < 1e-4
    assert {draft[3] for draft in driver.drafts} == {0, 1, 2}
    firsts = {name: first for name, _, _, _, first, _ in driver.drafts}
    assert firsts[0] == 1
    assert firsts[1] == 2 * driver.context.block_size_tokens + 1


def test_a_wrong_hidden_state_is_seen(monkeypatch):
    """The negative control: the state after the token itself instead of the one before it."""
    read = HiddenStates.read

    def later(self, wanted):
        return read(self, [(name, range(one.start + 1, one.stop + 1)) for name, one in wanted])

    monkeypatch.setattr(HiddenStates, "read", later)
    driver = Watched("attention_only", 2, "kernel")
    assert not worst(driver) < 1e-4


def test_more_tokens_than_are_kept(monkeypatch):
    """SP-10: the layer's text begins with the last tokens of the prompt whose hidden states are kept."""
    monkeypatch.setattr(hidden_states, "KEPT_TOKENS", 8)
    driver = Watched("hybrid", 2, "kernel")
    assert worst(driver) < 1e-4
    firsts = {name: first for name, _, _, _, first, _ in driver.drafts}
    assert firsts[0] == 2 * driver.context.block_size_tokens + 3 - 8 + 1


def test_a_proposal_again():
    """SP-10: a request that made no step since then has the same drafts; the layer goes on from what it has read."""
    driver = Watched("hybrid", 3, None)
    driver.add(0, make_prompt(21), num_tokens_to_generate=8)
    for _ in range(3):
        driver.step()
    ask = DraftAsk(0, next(iter(driver.scheduler.queues.running)).tokens, 3)
    drafts = driver.drafter.propose([ask])
    assert len(drafts[0]) == 3
    before = len(driver.drafts)
    assert driver.drafter.propose([ask]) == drafts
    again = driver.drafts[before:]
    for one, other in zip(driver.drafts[before - len(again) : before], again, strict=True):
        assert_logits_close(one[-1], other[-1])
    driver.run()


def test_memory_is_what_the_plan_says():
    """SP-10: keys, values, states and hidden states."""
    driver = Watched("hybrid", 2, None)
    pools, planned = driver.drafter._context.allocated, driver.context.plan.geometry
    tensors = [pools.kv, driver.drafter._hidden._rows]
    tensors += [one for pool in (pools.live_states, pools.snapshots) for one in (pool.conv, pool.ssm)]
    assert sum(one.nbytes for one in tensors) == planned.draft_model.pool_bytes(planned.blocks)


def test_pools_are_given_back():
    """SP-10: a suspend frees them; texts are read again afterwards."""
    driver = Watched("hybrid", 2, "kernel")
    driver.add(0, make_prompt(21), num_tokens_to_generate=8)
    driver.run()
    driver.engine.suspend()
    assert driver.drafter._context.pools is None
    assert driver.drafter._hidden._rows is None
    driver.engine.resume()
    driver.add(1, make_prompt(21), num_tokens_to_generate=8)
    records = driver.run()
    assert records[1].generated_tokens == records[0].generated_tokens
