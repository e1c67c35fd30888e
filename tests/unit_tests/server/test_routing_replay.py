"""MF-9: the server returns the experts of each token to requests that ask, right after every kind of hit."""

from __future__ import annotations

import base64
import json
from array import array
from collections.abc import Callable

import httpx
import pytest
import torch

from megatron_ext import load_engine
from tests.unit_tests.mcore.test_routing_replay import expected_experts
from tests.unit_tests.server.test_errors import check_error
from tests.unit_tests.support.server import PATIENCE, LiveServer

BLOCK = 16
MODEL = {
    "hybrid_override_pattern": "ME*EM-",
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_experts": 8,
    "moe_router_topk": 3,
    "moe_ffn_hidden_size": 24,
    "mamba_num_heads": 4,
    "mamba_num_groups": 2,
    "mamba_head_dim": 16,
    "mamba_state_dim": 16,
    "tokenizer_type": "NullTokenizer",
    "vocab_size": 64,
    "moe_enable_routing_replay": True,
    "inference_dynamic_batching_block_size": BLOCK,
    "inference_dynamic_batching_block_count": 64,
    "inference_dynamic_batching_max_requests": 8,
}
PROMPT = [1 + (5 * i * i + i) % 60 for i in range(3 * BLOCK + 5)]
COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture(scope="module")
def start(serve) -> Callable[..., LiveServer]:
    """A function: start a server of a model with experts."""
    return lambda **settings: serve(load_engine(**MODEL, **settings), enable_admin_routes=True, api_key="key")


@pytest.fixture(scope="module")
def server(start) -> LiveServer:
    return start()


def ask(server: LiveServer, path: str = COMPLETION, **fields: object) -> httpx.Response:
    body = {"max_tokens": 6, "ignore_eos": True, "return_token_ids": True, "return_routed_experts": True, **fields}
    headers = {"Authorization": "Bearer key"}
    return httpx.post(f"{server.url}{path}", json=body, headers=headers, timeout=PATIENCE)


def check(server: LiveServer, choice: dict, prompt: list[int]) -> None:
    """Compare the experts of a choice with those of a plain forward of its tokens."""
    tokens = [*prompt, *choice["token_ids"]]
    found = choice["routed_experts"]
    assert found["dtype"] == "int16"
    assert found["shape"] == [len(tokens) - 1, 2, 3]
    rows = torch.tensor(array("h", base64.b64decode(found["data"], validate=True))).view(found["shape"])
    model = server.serving.engine.weight_writer.loaded.model
    assert rows.sort(-1).values.tolist() == expected_experts(model, tokens)[:-1]


def cached(answer: dict) -> int:
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_cold_and_on_a_hit(server: LiveServer) -> None:
    for fewest in (0, BLOCK):
        answer = ask(server, prompt=PROMPT).json()
        assert cached(answer) >= fewest
        check(server, answer["choices"][0], PROMPT)


def test_choices_of_several_prompts(server: LiveServer) -> None:
    """Samples of one prompt are computed together."""
    prompts = [PROMPT[::-1], PROMPT[3:]]
    choices = ask(server, prompt=prompts, n=3, temperature=1, seed=5).json()["choices"]
    assert len({tuple(one["token_ids"]) for one in choices}) > 2
    for index, choice in enumerate(choices):
        check(server, choice, prompts[index // 3])


def test_a_stream_has_them_at_its_end(server: LiveServer) -> None:
    lines = [line[6:] for line in ask(server, prompt=PROMPT, stream=True).text.splitlines() if line[:6] == "data: "]
    parts = [json.loads(line)["choices"][0] for line in lines[:-1]]
    assert ["routed_experts" in part for part in parts] == [part["finish_reason"] is not None for part in parts]
    tokens = [token for part in parts for token in part["token_ids"]]
    check(server, parts[-1] | {"token_ids": tokens}, PROMPT)


class TestRefusals:
    def test_a_server_that_records_none(self, embedded: LiveServer) -> None:
        for path, prompt in ((COMPLETION, {"prompt": "a"}), (CHAT, {"messages": [{"role": "user", "content": "a"}]})):
            error = check_error(ask(embedded, path, **prompt), 400)
            assert error["param"] == "return_routed_experts"
            assert "--moe-enable-routing-replay" in error["message"]
