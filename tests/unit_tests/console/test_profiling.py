"""OB-1: a trace of an engine's steps, with their phases named."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from megatron_ext.config import RequestParams
from megatron_ext.console import profiling
from megatron_ext.console.profiling import profiled
from megatron_ext.console.start import check_profile
from megatron_ext.engine.client_request import EngineRequest
from megatron_ext.errors import ConfigError
from megatron_ext.mcore.profiler_phases import PHASES
from megatron_ext.models.llm_engine import LLMEngine
from megatron_ext.scheduling.request_inputs import RequestInputs
from tests.unit_tests.support.driver import make_prompt
from tests.unit_tests.support.server import tiny_engine


def run(engine: LLMEngine, count: int) -> int:
    """Serve a prompt twice, the second time from a snapshot, in a thread as the server does. Steps that it took."""
    client = engine.client
    params = RequestParams(num_tokens_to_generate=count)
    for _ in range(2):
        request = EngineRequest(RequestInputs(tuple(make_prompt(40, seed=3)), params))
        client.submit([request])
        request.record.result()
    client.close()
    return engine.counts()[1].steps


def events(directory: Path) -> list[dict]:
    (file,) = directory.iterdir()
    return [one for one in json.loads(file.read_text())["traceEvents"] if one.get("name") in PHASES and "dur" in one]


def test_every_phase_of_every_step(tmp_path):
    """Phases come in order, and operations of the model are inside the forward."""
    engine = LLMEngine(tiny_engine())
    with profiled(engine, str(tmp_path)):
        steps = run(engine, 4)
    found = events(tmp_path)
    assert Counter(one["name"] for one in found) == dict.fromkeys(PHASES, steps)
    first = {name: next(one for one in found if one["name"] == name) for name in PHASES}
    starts = [first[name]["ts"] for name in PHASES]
    assert starts == sorted(starts)
    (file,) = tmp_path.iterdir()
    operations = [one for one in json.loads(file.read_text())["traceEvents"] if one.get("cat") == "cpu_op"]
    begin, end = first["forward"]["ts"], first["forward"]["ts"] + first["forward"]["dur"]
    inside = [one for one in operations if begin <= one["ts"] and one["ts"] + one["dur"] <= end]
    assert len(inside) > len(PHASES)


def test_the_first_steps_only(tmp_path, monkeypatch):
    monkeypatch.setattr(profiling, "MAX_STEPS", 3)
    engine = LLMEngine(tiny_engine())
    with profiled(engine, str(tmp_path)):
        assert run(engine, 8) > 3
    assert Counter(one["name"] for one in events(tmp_path))["forward"] == 3


def test_the_engine_is_closed(tmp_path, monkeypatch):
    """TE-6: under a profile as without one, when the trace has been written."""
    engine, closed = LLMEngine(tiny_engine()), []
    core = type(engine.inference_engine.core)
    monkeypatch.setattr(core, "close", lambda self: closed.append(list(tmp_path.iterdir())))
    with profiled(engine, str(tmp_path)):
        run(engine, 1)
    assert len(closed) == 1
    assert closed[0], "the trace is there by then"


def test_where_it_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--profile .*file"):
        check_profile(str(tmp_path / "file"), None)
    with pytest.raises(ConfigError, match="one rank"):
        check_profile(str(tmp_path), object())
    check_profile(str(tmp_path / "new" / "folder"), None)
    assert (tmp_path / "new" / "folder").is_dir()
