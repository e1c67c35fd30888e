"""Replicas behind the request router of Ray Serve: where requests go, an update, and a replica that is killed."""

from __future__ import annotations

import random
from collections.abc import Callable

import httpx
import pytest

from megatron_ext.ray_serve.forwarded import SENDER
from tests.ray.clients import Stream, pids, tokens, traffic, wait_until
from tests.ray.conftest import FLEET

pytestmark = pytest.mark.ray

CHATS, TURNS = 8, 4
RECORDED = 1920  # of 3,392 prompt tokens, skipped by two replicas (docs/ray.md)
SHARE = 0.98  # of them
UPDATED = FLEET | {"num_ingress_replicas": 2, "served_model_name": "other"}


def skipped(client: httpx.Client) -> int:
    """Prompt tokens that are skipped of a few conversations, in another order each turn."""
    said: dict[int, list[dict[str, str]]] = {chat: [] for chat in range(CHATS)}
    count = 0
    for turn in range(TURNS):
        for chat in random.Random(turn).sample(list(said), CHATS):
            question = f"Question {turn} of chat {chat}: " + f"what is {chat} times {turn}? " * 4
            said[chat].append({"role": "user", "content": question})
            body = {"messages": said[chat], "max_tokens": 8, "temperature": 0}
            answer = client.post("/v1/chat/completions", json=body).raise_for_status().json()
            said[chat].append(answer["choices"][0]["message"])
            count += answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return count


@pytest.fixture(scope="module")
def fleet(run: Callable[..., httpx.Client]) -> httpx.Client:
    return run(**FLEET)


def test_conversations_return_to_their_replica(fleet: httpx.Client):
    """RP-6: nearly as many tokens are skipped as are recorded."""
    check_conversations(fleet)


def check_conversations(client: httpx.Client) -> None:
    client.post("/reset_prefix_cache").raise_for_status()
    found = skipped(client)
    print(f"skipped: {found}, recorded {RECORDED}")
    assert found >= SHARE * RECORDED


def test_an_update_loses_no_request(run: Callable[..., httpx.Client], fleet: httpx.Client):
    """RP-6: new replicas and ingresses take the place of the old ones; streams under way end on the old ones.

    Whichever of several ingresses gets a request, it knows where its prefix is.
    """
    before = pids()
    with traffic(fleet.base_url) as wrong:
        with Stream(fleet, tokens(300, 40), 600) as stream:
            stream.read(1)
            client = run(**UPDATED)
            stream.check_rest()
        wait_until(lambda: not before & pids(), "an old replica goes on")
    assert wrong == []
    assert client.get("/v1/models").json()["data"][0]["id"] == "other"
    assert cached(client) == 0
    wait_until(lambda: min(cached(client) for _ in range(8)) >= 192, "an ingress does not know the prefix")


def cached(client: httpx.Client) -> int:
    """Tokens of one prompt that are found cached."""
    body = {"prompt": tokens(400, 200), "max_tokens": 1}
    usage = client.post("/v1/completions", json=body).raise_for_status().json()["usage"]
    return usage["prompt_tokens_details"]["cached_tokens"]


def test_conversations_return_to_their_replica_from_two_ingresses(run: Callable[..., httpx.Client]):
    """RP-6: the same, though each ingress gets a part of the requests."""
    check_conversations(run(**UPDATED))


def test_the_router_has_nothing_of_the_process_that_deploys():
    """RP-2: Ray pickles its module by value; an ingress tells its own requests from others by an id of its process."""
    from ray.serve.config import RequestRouterConfig

    from megatron_ext.ray_serve.request_router import PrefixRequestRouter

    pickled = RequestRouterConfig(request_router_class=PrefixRequestRouter).get_serialized_request_router_cls()
    assert SENDER.encode() not in pickled
