"""LA-2: gated delta nets with attention in the dynamic engine, prefix caching in both modes.

`HybridDriver` compares every admission, account, snapshot and KV write with token lists; the oracle's states come from
a recurrence of its own, one token at a time.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from megatron_ext.errors import ConfigError
from megatron_ext.models.build import resolve_spec
from tests.priority import TestPriority
from tests.unit_tests.support.caching import BLOCK
from tests.unit_tests.support.driver import (
    assert_equals_expected,
    assert_equals_oracle,
    assert_states_close,
    assert_states_equal_oracle,
    make_prompt,
    what_it_gave,
)
from tests.unit_tests.support.hybrid_caching import (
    HybridDriver,
    assert_prefill_states_equal,
    assert_snapshots_equal_oracle,
    build_driver,
)
from tests.unit_tests.support.models import GATED_DELTA_NET, build_slow_decay
from tests.unit_tests.support.oracle import Oracle

pytestmark = pytest.mark.priority(TestPriority.HIGH)

KIND = "gated_delta_net"
LENGTHS = [4 * BLOCK + offset for offset in (-1, 0, 1, 2)]  # 2 is the convolution window less one
OTHER_END = make_prompt(30, seed=1)
REQUESTS = 6  # of each length


@pytest.fixture
def oracle(get_oracle):
    return get_oracle(KIND)


def play(driver: HybridDriver) -> HybridDriver:
    """A prompt; while it decodes the same one and one that shares its beginning; when all have ended, the next turn."""
    prompts = [make_prompt(length) for length in LENGTHS]
    ends = [(0, []), (1, []), (2, OTHER_END), (3, OTHER_END), (4, [])]
    for number, end in ends:
        for i, prompt in enumerate(prompts):
            tokens = [*prompt[: 2 * BLOCK + 3], *end] if end else prompt
            count = 20 if number == 0 else 3
            driver.add(number + i * REQUESTS, tokens, num_tokens_to_generate=count, cache_salt=str(i))
        if number == 0:
            while not all(request.generated_count for request in driver.scheduler.queues):
                driver.step()
        if number in (2, 3):
            driver.run()
    driver.run()
    for i, prompt in enumerate(prompts):
        turn = [*prompt, *driver.records[i * REQUESTS].generated_tokens, *make_prompt(5, seed=2)]
        driver.add(5 + i * REQUESTS, turn, num_tokens_to_generate=3, cache_salt=str(i))
    driver.run()
    return driver


def rule(length: int, policy: str) -> list[int]:
    """Tokens that each of a length's six requests skips."""
    own, turn = (length - 1) // BLOCK * BLOCK, (length + 19) // BLOCK * BLOCK
    if policy == "ref_zero":  # a request that arrives after all have ended finds nothing
        return [0, own, 0, 0, 0, 0]
    return [0, own, 0, (2 * BLOCK + 3 + 30) // BLOCK * BLOCK, own, turn]


@pytest.mark.parametrize(("mode", "budget"), [("kernel", 70), ("kernel", 400), ("align", 400)])
@pytest.mark.parametrize("policy", ["lru", "ref_zero"])
def test_cache_on_equals_cache_off(get_oracle, get_driver, oracle, mode, budget, policy):
    """LA-2, HY-3, HY-4, HY-6, HY-7, EX-1: tokens, logits, log-probs, states, skipped tokens.

    In `align` a smaller budget would end chunks, and leave states, at positions that were not requested.
    """
    batching = {"max_tokens": budget, "max_requests": 24}
    off = play(get_driver(KIND, **batching))
    on = play(build_driver(get_oracle, KIND, mode=mode, policy=policy, **batching))
    skipped = [on.skipped(*range(i * REQUESTS, (i + 1) * REQUESTS)) for i in range(len(LENGTHS))]
    assert skipped == [rule(length, policy) for length in LENGTHS]
    assert len(on.records) == len(LENGTHS) * REQUESTS
    for request_id in on.records:
        assert_equals_expected(on, request_id, what_it_gave(off, request_id))
        assert_prefill_states_equal(on, off, request_id)
    for request_id in (1, 9, 17):
        assert_equals_oracle(on, request_id, oracle)


STACKS = {
    "no attention": {"hybrid_override_pattern": "M-M-"},
    "two in a row": {"hybrid_override_pattern": "MM*"},
    "gated attention": {"attention_output_gate": True, "qk_layernorm": True, "apply_layernorm_1p": True}
    | {"position_embedding_type": "rope", "rotary_percent": 0.5},
    "gated shared experts": {"hybrid_override_pattern": "ME*E", "num_experts": 6, "moe_ffn_hidden_size": 20}
    | {"moe_shared_expert_intermediate_size": 24, "moe_shared_expert_gate": True, "swiglu": True},
}


@pytest.mark.parametrize("fields", STACKS.values(), ids=STACKS)
def test_other_stacks(fields):
    """LA-2: stacks without attention use blocks as bookkeeping only; others have attention and experts (Qwen3-Next)."""
    config = dataclasses.replace(GATED_DELTA_NET, **fields)
    oracle = Oracle(build_slow_decay(config))
    driver = HybridDriver(oracle.model, config, max_tokens=40)
    prompt = make_prompt(3 * BLOCK + 5)
    assert [driver.sight(number, prompt) for number in range(2)] == [0, 48]
    for number in range(2):
        assert_equals_oracle(driver, number, oracle)


@pytest.mark.parametrize("block", [48, 64, 80, 128])
def test_snapshots_inside_one_prefill(get_oracle, oracle, block):
    """HY-4, HY-12: snapshots are right for every block size; the kernel chunk does not depend on it."""
    driver = build_driver(get_oracle, KIND, block_size=block, max_tokens=1000)
    assert driver.engine.geometry.kernel_chunk == 64
    prompt = make_prompt(3 * block + 7)
    for number, end in enumerate([2 * block + 9, len(prompt), len(prompt)]):
        assert driver.sight(number, prompt[:end]) == [0, 2 * block, 3 * block][number]
        assert_equals_oracle(driver, number, oracle)
    assert assert_snapshots_equal_oracle(driver, prompt, oracle) == [2 * block, 3 * block]


@pytest.mark.parametrize("budget", [17, 23, 40, 64, 1000])
def test_states_do_not_depend_on_where_prefill_was_cut(get_oracle, oracle, budget):
    """HY-9, HY-7, FX-2, FX-4: chunks shorter than the convolution window among them."""
    driver = build_driver(get_oracle, KIND, max_tokens=budget, max_requests=8)
    prompts = [make_prompt(length, seed=length) for length in (1, 2, 33, 66, 129)]
    for number, prompt in enumerate(prompts):
        driver.add(number, prompt, num_tokens_to_generate=3)
    driver.run()
    for number, prompt in enumerate(prompts):
        assert_states_equal_oracle(driver, number, oracle)
        boundary = (len(prompt) - 1) // BLOCK * BLOCK
        assert assert_snapshots_equal_oracle(driver, prompt, oracle)[-1:] == ([boundary] if boundary else [])


def test_both_modes_keep_equal_states_and_serve_each_other(get_oracle, oracle):
    """LA-5."""
    prompt = make_prompt(5 * BLOCK)
    drivers = {mode: build_driver(get_oracle, KIND, mode=mode) for mode in ("kernel", "align")}
    pools = {}
    for mode, driver in drivers.items():
        driver.sight(0, prompt)
        assert driver.snapshots_of(prompt) == [64, 80]
        slots = [driver.states.find(driver.model.block_hash((None, tuple(prompt[:end])))) for end in (64, 80)]
        pool = driver.context.snapshots
        pools[mode] = pool.conv[:, slots], pool.ssm[:, slots]
    for kernel, align in zip(*pools.values(), strict=True):
        assert_states_close(kernel, align, "snapshots after 64 and 80 tokens")
    for mode, driver in drivers.items():
        is_aligned = mode == "kernel"  # what the other mode left
        driver.keep_snapshots(at_chunk_ends=is_aligned)
        assert driver.sight(1, [*prompt, *make_prompt(30, seed=1)]) == 80
        assert_equals_oracle(driver, 1, oracle)


def test_padding_never_reaches_a_state(get_driver, oracle):
    """HY-10: the packed tokens are padded to a multiple of 32."""
    driver = get_driver(KIND, token_rounder=32, max_tokens=64)
    for number, length in enumerate((1, 40, 65)):
        driver.add(number, make_prompt(length))
    driver.run()
    for number in range(3):
        assert_equals_oracle(driver, number, oracle)


def test_the_budget_counts_what_the_mixer_says(get_driver):
    """HY-1: convolution state [80, 2] and recurrent matrix [4, 8, 12] of two layers, in fp32."""
    geometry = get_driver(KIND).engine.geometry
    assert geometry.state_bytes == 2 * 4 * (80 * 2 + 4 * 8 * 12)
    narrow = get_driver(KIND, conv_states_dtype="bf16").engine.geometry
    assert narrow.state_bytes == 2 * (2 * 80 * 2 + 4 * 4 * 8 * 12)


@pytest.mark.parametrize("which", ["conv", "ssm"])
@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("change", ["zeroed", "of another prompt"])
def test_the_comparison_sees_a_wrong_state(get_oracle, oracle, which, layer, change):
    """Negative control: one kind of state, in one layer, of the snapshot that the second request resumes from."""
    driver, prompt, other = build_driver(get_oracle, KIND), make_prompt(100), make_prompt(100, seed=1)
    for number, tokens in enumerate((prompt, other)):
        driver.sight(number, tokens)
    pool = getattr(driver.context.snapshots, which)
    slots = [driver.states.find(driver.model.block_hash((None, tuple(tokens[:96])))) for tokens in (prompt, other)]
    pool[layer, slots[0]] = 0.0 if change == "zeroed" else pool[layer, slots[1]].clone()
    assert driver.sight(2, prompt) == 96
    with pytest.raises(AssertionError, match=r"logits of token|^token"):
        assert_equals_oracle(driver, 2, oracle)
    difference = (driver.seen[2].logits[100][0] - oracle.logits(prompt)[-1]).abs().max()
    assert difference > (1e-3 if which == "conv" and layer else 1e-2), difference


def test_a_spec_of_another_kind_is_refused():
    """A model has one kind of recurrent layers: the pattern's M, whichever way it is named."""
    own = "megatron_ext.mcore.layer_specs"
    named = dataclasses.replace(GATED_DELTA_NET, spec=(own, "gated_delta_net_stack_spec"))
    assert resolve_spec(named) == resolve_spec(GATED_DELTA_NET)
    for kind, name in (("mamba2", "gated_delta_net_stack_spec"), ("gated_delta_net", "hybrid_stack_spec")):
        config = dataclasses.replace(GATED_DELTA_NET, recurrent_layer=kind, spec=(own, name))
        with pytest.raises(ConfigError, match=f"--spec {own} {name} .*--recurrent-layer is {kind}; give"):
            resolve_spec(config)


def test_training_has_gradients_everywhere(oracle):
    """A served model trains: a forward with labels gives every parameter a finite gradient that is not zero."""
    model = build_slow_decay(GATED_DELTA_NET).train()
    tokens = torch.tensor([make_prompt(70), make_prompt(70, seed=1)])
    loss = model(tokens, torch.arange(70).expand(2, -1), None, labels=tokens.roll(-1, 1)).mean()
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 0, name
