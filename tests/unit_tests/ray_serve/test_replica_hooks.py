"""New weights for a replica under Ray Serve, by its configuration; Ray itself is not needed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from megatron_ext.config import ServerConfig
from megatron_ext.errors import ConfigError
from megatron_ext.ray_serve.replica_hooks import ReplicaHooks
from megatron_ext.server.app import create_app
from megatron_ext.server.serving import Serving, WeightsUpdater
from tests.unit_tests.server.test_admin import tiny_updater, write_tiny_weights


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of checkpoints."""
    folder = tmp_path_factory.mktemp("weights")
    write_tiny_weights(folder)
    return folder


@pytest.fixture
async def replica(folder: Path) -> AsyncIterator[ReplicaHooks]:
    updater = tiny_updater(folder)
    hooks = ReplicaHooks()
    hooks._serving = Serving(updater.engine, "m", ServerConfig(), updater=updater)
    app = create_app(hooks._serving)
    async with app.router.lifespan_context(app):
        yield hooks


async def test_weights_are_replaced_once(replica: ReplicaHooks, monkeypatch: pytest.MonkeyPatch):
    """RP-6: a configuration that has not changed, which Ray passes again with a new rank, reads nothing."""
    before = replica._serving.weights_hash
    await replica.reconfigure({"weights": "new"})
    assert replica._serving.weights_hash not in ("", before)
    monkeypatch.setattr(WeightsUpdater, "update", None)
    await replica.reconfigure({"weights": "new"})


@pytest.mark.parametrize("config", [{}, {"weights": 3}, {"weights": "new", "more": 1}, {"weights": "spoilt"}])
async def test_mistakes_change_nothing(replica: ReplicaHooks, config: object):
    """RP-6: the deployment fails with the reason, also when Ray tries it again."""
    before = replica._serving.weights_hash
    for _ in range(2):
        with pytest.raises(ConfigError):
            await replica.reconfigure(config)
    assert replica._serving.weights_hash == before


async def test_a_replica_without_a_root_reads_no_weights(replica: ReplicaHooks):
    """RP-6: the setting that is missing is named."""
    replica._serving.updater = None
    with pytest.raises(ConfigError, match="weights_root"):
        await replica.reconfigure({"weights": "new"})
