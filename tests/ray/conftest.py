"""A cluster of Ray on this machine, and applications in it. Ray is imported where it is needed only."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import psutil
import pytest

if TYPE_CHECKING:
    from ray.cluster_utils import Cluster

CPUS = 2  # of a node with replicas
PATIENCE = 300.0  # seconds until a test gives up; nothing is measured
LONG = 10 * PATIENCE  # seconds
REPLICAS = "ServeReplica:default:megatron_ext_replicas"
INGRESS = "ServeReplica:default:megatron_ext"
SETTINGS = {
    "model": "embedded",
    "num_cpus": 1,
    "inference_dynamic_batching_block_size": 16,
    "inference_dynamic_batching_block_count": 200,
    "inference_dynamic_batching_prefix_caching_mamba_slots": 64,
    "inference_dynamic_batching_max_requests": 16,
}
FLEET = {"num_replicas": 2, "shutdown_timeout": LONG}  # no request is to need so long when a replica stops


@pytest.fixture(scope="session")
def folder() -> Iterator[Path]:
    """Folder of Ray's sockets and logs; the sockets have short names."""
    with tempfile.TemporaryDirectory(dir="/tmp") as path:
        yield Path(path)


@pytest.fixture(scope="session")
def nodes(folder: Path) -> Iterator[Cluster]:
    """Three raylets on this machine: one with the controller and Ray's proxy, and two with CPUs for replicas."""
    import ray
    from ray.cluster_utils import Cluster

    Path("/tmp/ray").mkdir(exist_ok=True)  # Ray notes the cluster's address there, whatever `temp_dir` is
    head = {"num_cpus": 0, "include_dashboard": False, "temp_dir": str(folder)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", str(PATIENCE))  # 5 s are too few on a busy machine
        patch.setenv("RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH", "megatron_ext.ray_serve.proxy.middlewares")
        cluster = Cluster(initialize_head=True, head_node_args=head)
        for _ in range(2):
            cluster.add_node(num_cpus=CPUS)
        ray.init(address=cluster.address, log_to_driver=False)
        yield cluster
        ray.shutdown()
        cluster.shutdown()


@pytest.fixture(scope="session")
def cluster(nodes: Cluster) -> Iterator[str]:
    """URL of Ray's proxy."""
    from ray import serve

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    # With a proxy on each node, all of them would share the port.
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
    yield f"http://127.0.0.1:{port}"
    serve.shutdown()


def processes(nodes: Cluster, name: str) -> list[psutil.Process]:
    """Actors of the cluster whose class, or deployment, is `name`; machines may run other clusters, too."""
    raylets = [node.all_processes["raylet"][0].process.pid for node in nodes.list_all_nodes()]
    workers = [one for raylet in raylets for one in psutil.Process(raylet).children()]
    return [one for one in workers if _title(one).removeprefix("ray::").partition(".")[0] == name]


def _title(process: psutil.Process) -> str:
    try:
        return "".join(process.cmdline())
    except psutil.NoSuchProcess:  # zombies included
        return ""


class Applications:
    """Applications of the cluster, one at a time.

    Args:
        url: URL of Ray's proxy.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._settings: dict[str, object] | None = None
        self._clients: list[httpx.Client] = []

    def __call__(self, **settings: object) -> httpx.Client:
        """Run an application instead of the last one, unless its settings are equal; return a client of it."""
        from ray import serve

        from megatron_ext.ray_serve import build_app

        if settings != self._settings:
            self._settings = None
            serve.run(build_app(**{**SETTINGS, **settings}))
            self._settings = settings
            headers = {"authorization": f"Bearer {settings['api_key']}"} if "api_key" in settings else {}
            self._clients.append(httpx.Client(base_url=self._url, timeout=PATIENCE, headers=headers))
        return self._clients[-1]

    def stop(self) -> None:
        """Stop the application."""
        from ray import serve

        self._settings = None
        serve.delete("default")

    def close(self) -> None:
        """Close all clients."""
        for client in self._clients:
            client.close()


@pytest.fixture(scope="session")
def run(cluster: str) -> Iterator[Applications]:
    """A function: runs an application. Tests with equal settings share one, if they follow each other."""
    applications = Applications(cluster)
    yield applications
    applications.close()
