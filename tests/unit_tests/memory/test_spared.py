"""OB-4: Python's garbage collector passes over objects that are loaded before serving begins."""

from __future__ import annotations

import gc
from unittest.mock import MagicMock

from megatron_ext.config import ServerSettings
from megatron_ext.memory.heap import freeze_loaded_objects
from megatron_ext.server import run


def test_full_collection_visits_later_objects_only():
    loaded, frozen = [[] for _ in range(10_000)], gc.get_freeze_count()
    freeze_loaded_objects()
    assert gc.get_freeze_count() >= frozen + len(loaded)
    assert len(gc.get_objects()) < len(loaded) / 2
    circle: list = []
    circle.append(circle)
    del circle
    assert gc.collect() >= 1, "cycles that come later are still found"


def test_the_server_does_so_when_its_model_is_there(monkeypatch):
    done = []
    monkeypatch.setattr(run, "build_serving", lambda *_: done.append("loaded") or MagicMock())
    monkeypatch.setattr(run, "freeze_loaded_objects", lambda: done.append("spared"))
    monkeypatch.setattr(run, "serve", lambda *_: done.append("served"))
    monkeypatch.setattr(run, "bind", lambda *_: run.socket.socket())
    run._listen_and_serve(ServerSettings(), None, MagicMock())
    assert done == ["loaded", "spared", "served"]
