"""A cluster of Ray on this machine, and applications in it. Ray is imported where it is needed only."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

PATIENCE = 120.0  # seconds until a test gives up; nothing is measured
SETTINGS = {
    "model": "embedded",
    "num_cpus": 1,
    "inference_dynamic_batching_block_size": 16,
    "inference_dynamic_batching_block_count": 200,
    "inference_dynamic_batching_prefix_caching_mamba_slots": 64,
    "inference_dynamic_batching_max_requests": 16,
}


@pytest.fixture(scope="session")
def folder() -> Iterator[Path]:
    """Folder of Ray's sockets and logs; the sockets have short names."""
    with tempfile.TemporaryDirectory(dir="/tmp") as path:
        yield Path(path)


@pytest.fixture(scope="session")
def cluster(folder: Path) -> Iterator[str]:
    """URL of Ray's proxy."""
    import ray
    from ray import serve

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    often = {"metrics_report_interval_ms": 1000}  # the default is 10 s
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", str(PATIENCE))  # 5 s are too few on a busy machine
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, _temp_dir=str(folder), _system_config=often)
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        yield f"http://127.0.0.1:{port}"
        serve.shutdown()
        ray.shutdown()


@pytest.fixture(scope="module")
def run(cluster: str) -> Iterator[Callable[..., httpx.Client]]:
    """A function: runs an application instead of the last one, and returns a client of it."""
    from ray import serve

    from megatron_ext.ray_serve import build_app

    clients: list[httpx.Client] = []

    def start(**settings: object) -> httpx.Client:
        serve.run(build_app(**{**SETTINGS, **settings}))
        headers = {"authorization": f"Bearer {settings['api_key']}"} if "api_key" in settings else {}
        clients.append(httpx.Client(base_url=cluster, timeout=PATIENCE, headers=headers))
        return clients[-1]

    yield start
    for client in clients:
        client.close()
    serve.delete("default")
