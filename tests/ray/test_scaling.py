"""A fleet under Ray Serve that grows and shrinks while requests are under way."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.ray.clients import DEPLOYMENT, Stream, pids, tokens, traffic, wait_until
from tests.ray.conftest import LONG

pytestmark = pytest.mark.ray


def states() -> dict[str, int]:
    """Number of replicas by Ray's name of their state."""
    from ray import serve

    status = serve.status().applications["default"].deployments[DEPLOYMENT]
    return {str(getattr(state, "value", state)): count for state, count in status.replica_states.items()}


def test_a_fleet_grows_and_shrinks(run: Callable[..., httpx.Client]):
    """RP-6: requests make it grow; a replica that leaves ends its streams, and then stops at once."""
    client = run(
        num_replicas=1,
        max_replicas=2,
        target_ongoing_requests=4,
        scaling_window=1.5,
        upscale_delay=0,
        downscale_delay=1,
        shutdown_timeout=LONG,
        inference_dynamic_batching_max_requests=8,
    )
    assert states() == {"RUNNING": 1}
    with ThreadPoolExecutor(12) as pool:
        bodies = [{"prompt": tokens(500 + 10 * i, 150), "max_tokens": 2000, "ignore_eos": True} for i in range(12)]
        answers = [pool.submit(client.post, "/v1/completions", json=body) for body in bodies]
        wait_until(lambda: states() == {"RUNNING": 2}, "it does not grow")
        assert [one.result().json()["usage"]["completion_tokens"] for one in answers] == [2000] * 12
    with traffic(client.base_url) as wrong:
        with Stream(client, tokens(700, 40), 2000) as one, Stream(client, tokens(800, 40), 2000) as other:
            one.read(1)
            other.read(1)
            wait_until(lambda: "STOPPING" in states(), "it does not shrink")
            assert len(pids()) == 2
            one.check_rest()
            other.check_rest()
        wait_until(lambda: len(pids()) == 1, "the replica does not stop")
    assert wrong == []
    assert states() == {"RUNNING": 1}
