"""CU-1, CU-3: engines with each `--operator-backend`; Triton runs under its interpreter."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from megatron_ext.errors import ConfigError
from megatron_ext.mcore import platform
from megatron_ext.models.build import build_model
from megatron_ext.ops import backend_selection, triton
from megatron_ext.ops.triton.kernel_registry import watch
from tests.unit_tests.support.caching import BLOCK
from tests.unit_tests.support.driver import assert_equals_oracle, make_prompt
from tests.unit_tests.support.hybrid_caching import HybridDriver, assert_snapshots_equal_oracle, build_driver
from tests.unit_tests.support.models import CONFIGS
from tests.unit_tests.support.padded import PaddedHybridDriver

PROMPT = make_prompt(2 * BLOCK + 3)
BRANCH = [*PROMPT[: BLOCK + 5], *make_prompt(6, seed=1)]
KERNELS = {
    "hybrid": {"conv_prefill", "conv_states", "conv_decode", "ssd_prefill", "ssd_decode"},
    "mamba1": {"conv_prefill", "conv_states", "conv_decode", "selective_prefill", "selective_decode"},
}
needs_triton = pytest.mark.skipif(
    triton.problem(platform.device()) is not None, reason=f"no kernel runs here: {triton.problem(platform.device())}"
)


@needs_triton
@pytest.mark.long
@pytest.mark.parametrize("kind", ["hybrid", pytest.param("mamba1", marks=pytest.mark.kernels)])
def test_kernels_in_an_engine_equal_a_recompute_with_the_cache_and_without(get_oracle, kind):
    """CU-1, CU-2, HY-4: tokens, logits, states and snapshots; a prompt, the same again, one that parts from it."""
    driver = build_driver(get_oracle, kind, operator_backend="triton", max_requests=4, max_tokens=40)
    with watch() as launches:
        driver.add(0, PROMPT, num_tokens_to_generate=3)
        driver.run()
        driver.add(1, PROMPT, num_tokens_to_generate=3)
        driver.add(2, BRANCH, num_tokens_to_generate=2)
        driver.run()
    assert {launch.kernel for launch in launches} >= KERNELS[kind]
    assert driver.skipped(0, 1)[1] == 2 * BLOCK
    for request_id in range(3):
        assert_equals_oracle(driver, request_id, get_oracle(kind))
    assert driver.records[1].generated_tokens == driver.records[0].generated_tokens
    assert_snapshots_equal_oracle(driver, PROMPT, get_oracle(kind))


def bf16_driver(backend: str, driver: type = HybridDriver, **settings: object):
    """Around a hybrid whose heads and states SSD computes by tiles, and blocks of a tile each."""
    config = dataclasses.replace(CONFIGS["attention_free"], mamba_head_dim=16, hybrid_override_pattern="M-")
    model = build_model(config, device=torch.device("cpu"), dtype=torch.bfloat16, seed=3)
    settings = {"max_requests": 2, "block_size": 64, "max_sequence_length": 256} | settings
    return driver(model, config, operator_backend=backend, **settings)


@needs_triton
@pytest.mark.long
@pytest.mark.parametrize("is_padded", [False, pytest.param(True, marks=pytest.mark.kernels)])
def test_tiles_of_ssd_in_an_engine_equal_the_reference(is_padded):
    """CU-1, CU-4, HY-4: bf16; a prompt in steps that end within a tile, then one that goes on from its snapshot."""
    prompt = make_prompt(141)
    other = [*prompt[:130], *make_prompt(20, seed=1)]
    logits = {}
    for backend in ("reference", "triton"):
        padded = is_padded and backend == "triton"
        kind = {"driver": PaddedHybridDriver, "num_cuda_graphs": 1} if padded else {}
        driver = bf16_driver(backend, max_tokens=100, **kind)
        with watch() as launches:
            for request_id, tokens in enumerate((prompt, other)):
                driver.add(request_id, tokens, num_tokens_to_generate=1, return_log_probs=False)
                driver.run()
        assert driver.engine.core.counters.skipped_tokens == 128
        assert ("chunk_scan" in {launch.kernel for launch in launches}) is (backend == "triton")
        assert "ssd_prefill" not in {launch.kernel for launch in launches}
        assert not padded or any(bucket.prefills for bucket in driver.buckets)
        logits[backend] = torch.stack([driver.seen[i].logits[len(one)][0] for i, one in enumerate((prompt, other))])
    found, expected = logits["triton"].float(), logits["reference"].float()
    assert (found - expected).abs().max() < 0.05 * expected.abs().max()
    assert (expected[0] - expected[1]).abs().max() > 0.5 * expected.abs().max(), "two prompts are told apart"


@pytest.mark.parametrize(("device", "why"), [("cpu", "with TRITON_INTERPRET=1 in the environment only"), ("meta", "")])
def test_triton_where_it_cannot_run_is_refused(monkeypatch, device, why):
    """CU-3: the setting is refused before anything is allocated, and the message names what would work."""
    monkeypatch.setattr(triton, "is_interpreted", lambda: False)
    with pytest.raises(ConfigError, match=rf"--operator-backend triton: .*{why}.*; auto and reference work here"):
        backend_selection.check("triton", torch.device(device))


def test_without_triton_it_is_refused_and_auto_is_not(monkeypatch):
    monkeypatch.setattr(triton, "_import_problem", lambda: "triton cannot be imported (there is none)")
    with pytest.raises(ConfigError, match=r"cannot be imported \(there is none\); auto and reference work here"):
        backend_selection.check("triton", torch.device("cuda"))
    backend_selection.check("auto", torch.device("cuda"))
