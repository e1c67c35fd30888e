"""Replicas of several ranks under Ray Serve: their answers, and their end."""

from __future__ import annotations

from typing import TYPE_CHECKING

import httpx
import psutil
import pytest

from megatron_ext import RequestParams, load_engine
from tests.ray.conftest import PATIENCE, SETTINGS, Applications, processes

if TYPE_CHECKING:
    from ray.cluster_utils import Cluster

pytestmark = pytest.mark.ray

SHARED = list(range(40, 140))
PROMPTS = [[*SHARED, 1, 2, 3], [5, 6, 7, 8], [*SHARED, 9], [*SHARED, 1, 2, 3]]
TOKENS = 10
Answer = tuple[list[int], int]  # token ids, and the number of skipped prompt tokens


@pytest.fixture(scope="module")
def alone() -> list[Answer]:
    """Answers of one rank."""
    settings = {name: value for name, value in SETTINGS.items() if name not in ("model", "num_cpus")}
    params = RequestParams(num_tokens_to_generate=TOKENS, temperature=0, ignore_eos=True)
    with load_engine(**settings) as engine:
        records = [engine.generate([prompt], params)[0] for prompt in PROMPTS]
    return [(list(one.generated_tokens), one.skipped_prefill_token_count) for one in records]


def answer(client: httpx.Client, prompt: list[int]) -> Answer:
    body = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    got = client.post("/v1/completions", json=body).raise_for_status().json()
    return got["choices"][0]["token_ids"], got["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize(
    ("flag", "router"), [("tensor_model_parallel_size", "prefix"), ("pipeline_model_parallel_size", "serve")]
)
def test_answers_and_counts_equal_those_of_one_rank(
    flag: str, router: str, run: Applications, nodes: Cluster, alone: list[Answer]
):
    """RP-6: tokens and skipped prompt tokens do not depend on the ranks of a replica, which end with it."""
    client = run(**{flag: 2}, router=router, api_key="k")
    others = processes(nodes, "RankActor")
    assert len(others) == 1
    assert [answer(client, prompt) for prompt in PROMPTS] == alone
    run.stop()
    _, alive = psutil.wait_procs(others, timeout=PATIENCE)
    assert not alive
    assert not processes(nodes, "RankActor")
