"""SE-5: routes of administrators. Effects, permissions, and refusals by name."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
import torch

from megatron_ext.config import BatchingConfig, CacheConfig, ServerConfig, SourceConfig
from megatron_ext.console import profiling
from megatron_ext.console.profiling import profiled
from megatron_ext.errors import ConfigError
from megatron_ext.mcore.assemble import build_engine
from megatron_ext.models.llm_engine import LLMEngine
from megatron_ext.models.load import load_model
from megatron_ext.models.megatron.dist_checkpoint import save_dist_checkpoint
from megatron_ext.models.update import disk
from megatron_ext.models.update.disk import WeightsRoot, read_new_weights
from megatron_ext.models.update.writer import WeightWriter
from megatron_ext.server.app import ROUTERS
from megatron_ext.server.run import weights_root
from megatron_ext.server.serving import WeightsUpdater
from tests.unit_tests.models.megatron import megatron_lm
from tests.unit_tests.server.test_errors import check_error
from tests.unit_tests.support.models import build_slow_decay
from tests.unit_tests.support.server import PATIENCE, TWO_LAYERS, LiveServer, tiny_engine

KEY = "the-only-key"
PROMPT = list(range(40))
ROUTES = (
    "/start_profile",
    "/stop_profile",
    "/sleep",
    "/wake_up",
    "/pause",
    "/resume",
    "/flush_cache",
    "/abort",
    "/update_weights_from_disk",
)


def write_tiny_weights(folder: Path) -> None:
    """Write a checkpoint `old`; beside it `new` has other weights, `spoilt` weights that do not fit."""
    save_dist_checkpoint(folder / "old", build_slow_decay(TWO_LAYERS), TWO_LAYERS)
    save_dist_checkpoint(folder / "new", build_slow_decay(TWO_LAYERS, seed=6), TWO_LAYERS)
    save_dist_checkpoint(folder / "spoilt", build_slow_decay(TWO_LAYERS, seed=6), TWO_LAYERS)
    last = "embedding.word_embeddings.weight"
    megatron_lm.edit_tensors(folder / "spoilt", lambda tensors: tensors.update({last: tensors[last].flatten()[1:]}))


def tiny_updater(folder: Path) -> WeightsUpdater:
    """Updater of an engine with the checkpoint `old`."""
    source = SourceConfig(load=str(folder / "old"), tokenizer_type="NullTokenizer")
    loaded = load_model(source, {})
    read = partial(read_new_weights, loaded, source, {})
    engine = build_engine(
        loaded.model,
        TWO_LAYERS,
        loaded.tokenizer,
        BatchingConfig(block_size=16, block_count=200, max_requests=8),
        CacheConfig(snapshot_slots=16),
        dtype=torch.float32,
    )
    return WeightsUpdater(WeightsRoot.of(str(folder)), LLMEngine(engine, WeightWriter(loaded, read=read)))


@pytest.fixture(scope="module")
def server(serve, tmp_path_factory) -> LiveServer:
    """Server with a loaded model, one key, which is the administrator's, and all routes."""
    folder = tmp_path_factory.mktemp("weights")
    write_tiny_weights(folder)
    updater = tiny_updater(folder)
    live = serve(updater.engine, api_key=KEY, enable_admin_routes=True)
    live.serving.updater = updater
    return live


def ask(server: LiveServer, method: str, path: str, key: str | None = KEY, **options: object) -> httpx.Response:
    headers = options.pop("headers", {}) | ({} if key is None else {"Authorization": f"Bearer {key}"})
    return server.http.request(method, path, headers=headers, **options)


def tokens(server: LiveServer, **fields: object) -> dict:
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 12} | fields
    answer = ask(server, "POST", "/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def started(server: LiveServer, client: httpx.Client, **fields: object) -> tuple[Iterator[str], str]:
    """The lines to come of a stream that has begun, and its id."""
    body = {"prompt": [5, 6], "temperature": 0, "max_tokens": 40, "stream": True} | fields
    headers = {"Authorization": f"Bearer {KEY}"}
    stream = client.send(client.build_request("POST", "/v1/completions", json=body, headers=headers), stream=True)
    lines = stream.iter_lines()
    return lines, json.loads(next(lines).removeprefix("data: "))["id"]


class TestWhoMayAsk:
    @pytest.mark.parametrize("path", ROUTES)
    def test_requires_the_key(self, server, path):
        for key in (None, "wrong"):
            check_error(ask(server, "POST", path, key, json={"abort_all": True}), 401)

    def test_a_tenant_is_refused(self, serve, tmp_path):
        (tmp_path / "keys").write_text("alice\nbob\n")
        (tmp_path / "admin").write_text("carol\n")
        files = {"api_key_file": str(tmp_path / "keys"), "admin_key_file": str(tmp_path / "admin")}
        shared = serve(tiny_engine(), enable_admin_routes=True, **files)
        for path in ROUTES:
            check_error(ask(shared, "POST", path, "alice", json={"abort_all": True}), 403)
        assert ask(shared, "POST", "/abort", "carol", json={"abort_all": True}).json() == {"aborted": 0}
        assert not shared.serving.requests.is_asleep

    def test_without_the_flag_there_are_none(self, serve):
        closed = serve(tiny_engine(), api_key=KEY)
        for path in ROUTES:
            check_error(ask(closed, "POST", path, json={"abort_all": True}), 404)
        assert not {route.path for router in ROUTERS for route in router.routes} & set(ROUTES)

    def test_a_root_needs_the_flag_and_a_directory(self, tmp_path):
        with pytest.raises(ConfigError, match=r"--weights-root .* needs --enable-admin-routes"):
            ServerConfig(weights_root=str(tmp_path))
        settings = ServerConfig(weights_root=str(tmp_path), enable_admin_routes=True)
        assert weights_root(settings) == WeightsRoot(tmp_path.resolve())
        assert weights_root(ServerConfig()) is None
        with pytest.raises(ConfigError, match="is not a directory"):
            weights_root(ServerConfig(weights_root=str(tmp_path / "none"), enable_admin_routes=True))


class TestSleep:
    def test_requests_in_flight_wait_and_go_on(self, server):
        """SE-5: tokens equal those without the suspend; meanwhile the pools are gone and new requests are refused."""
        expected = tokens(server, prompt=[5, 6], max_tokens=40)["choices"][0]["text"]
        with httpx.Client(base_url=server.url, timeout=PATIENCE) as client:
            with server.held():
                stream, _ = started(server, client)
                assert ask(server, "POST", "/sleep").json() == {"is_sleeping": True}
            assert ask(server, "POST", "/sleep?level=1", json={}).json() == {"is_sleeping": True}
            assert ask(server, "GET", "/is_sleeping").json() == {"is_sleeping": True}
            assert server.engine.is_suspended
            assert server.http.get("/health").json()["status"] == "asleep"
            error = check_error(ask(server, "POST", "/v1/completions", json={"prompt": [1]}), 503)
            assert error["code"] == "server_asleep"
            steps = server.engine.step_count
            assert ask(server, "GET", "/prefix_cache").json()["occupancy"]["blocks_cached"] == 0
            assert server.engine.step_count == steps
            assert ask(server, "POST", "/wake_up").json() == {"is_sleeping": False}
            assert not server.engine.is_suspended
            ended = "".join(stream)
        assert "[DONE]" in ended
        assert tokens(server, prompt=[5, 6], max_tokens=40)["choices"][0]["text"] == expected
        server.check_idle()
        assert server.metric("step_failures_total") == 0

    @pytest.mark.parametrize(("level", "cached"), [("0", True), ("keep", True), ("offload", True), ("1", False)])
    def test_levels(self, server, level, cached):
        """SE-5: the cache outlives a sleep whose level keeps the pools or moves them to host memory."""
        expected = tokens(server)
        assert ask(server, "POST", f"/sleep?level={level}").status_code == 200
        assert ask(server, "POST", "/wake_up").status_code == 200
        found = tokens(server)
        assert found["choices"][0]["text"] == expected["choices"][0]["text"]
        assert (found["usage"]["prompt_tokens_details"]["cached_tokens"] > 0) is cached

    def test_a_wake_up_that_fails_leaves_it_asleep(self, server, monkeypatch):
        ask(server, "POST", "/sleep")

        def fail(**_: object) -> None:
            raise RuntimeError(
                "[enforce fail at alloc_cpu.cpp:117] can't allocate memory: you tried to allocate 8 bytes"
            )

        with monkeypatch.context() as patch:
            patch.setattr(server.engine.context, "allocate_all_tensors", fail)
            assert "no memory" in check_error(ask(server, "POST", "/wake_up"), 503)["message"]
        assert ask(server, "GET", "/is_sleeping").json() == {"is_sleeping": True}
        ask(server, "POST", "/wake_up")
        assert tokens(server)["usage"]["completion_tokens"] == 12


class TestProfile:
    def test_a_trace_of_the_steps_between(self, server, tmp_path, monkeypatch):
        """OB-1: named phases are in the file; a second start, and one too many, are conflicts; steps are bounded."""
        assert "--profile DIR" in check_error(ask(server, "POST", "/start_profile"), 400)["message"]
        monkeypatch.setattr(profiling, "MAX_TRACES", 3)
        with profiled(server.serving.engine, str(tmp_path)) as tracer:
            monkeypatch.setattr(server.serving, "tracer", tracer)
            assert ask(server, "POST", "/stop_profile").json() == {"is_profiling": False, "file": None}
            tokens(server)
            assert list(tmp_path.iterdir()) == []
            assert ask(server, "POST", "/start_profile?max_seconds=60").json() == {"is_profiling": True}
            assert "is running" in check_error(ask(server, "POST", "/start_profile"), 409)["message"]
            tokens(server)
            name = ask(server, "POST", "/stop_profile").json()["file"]
            assert [file.name for file in tmp_path.iterdir()] == [name]
            traced = {one.get("name") for one in json.loads((tmp_path / name).read_text())["traceEvents"]}
            assert {"plan", "forward", "commit"} <= traced
            monkeypatch.setattr(profiling, "MAX_STEPS", 2)
            ask(server, "POST", "/start_profile?max_seconds=60")
            tokens(server)
            assert len(list(tmp_path.iterdir())) == 2, "written after two steps"
            assert "restart it" in check_error(ask(server, "POST", "/start_profile"), 409)["message"]
        for seconds in ("0", "61", "nan"):
            check_error(ask(server, "POST", f"/start_profile?max_seconds={seconds}"), 400)


class TestPause:
    @pytest.fixture(autouse=True)
    def resumed(self, server) -> Iterator[None]:
        yield
        assert ask(server, "POST", "/resume").json() == {"is_paused": False}

    def test_requests_in_flight_wait_and_go_on(self, server):
        """SE-5: streams stay open, new requests wait, and health and load say so; tokens are those without it."""
        expected = tokens(server, prompt=[5, 6], max_tokens=40)["choices"][0]["text"]
        with httpx.Client(base_url=server.url, timeout=PATIENCE) as client:
            with server.held():
                stream, _ = started(server, client)
                assert ask(server, "POST", "/pause").json() == {"is_paused": True, "ended": 0}
            assert ask(server, "GET", "/is_paused").json() == {"is_paused": True}
            health = server.http.get("/health")
            assert (health.status_code, health.json()["status"]) == (200, "paused")
            load = ask(server, "GET", "/load").json()
            assert (load["status"], load["running"]) == ("paused", 1)
            steps = server.engine.step_count
            late, seen = threading.Thread(target=lambda: seen.append(tokens(server))), []
            late.start()
            while ask(server, "GET", "/load").json()["waiting"] == 0:
                pass
            assert (server.engine.step_count, seen) == (steps, [])
            ask(server, "POST", "/resume")
            assert "[DONE]" in "".join(stream)
            late.join(PATIENCE)
        assert seen[0]["usage"]["completion_tokens"] == 12
        assert tokens(server, prompt=[5, 6], max_tokens=40)["choices"][0]["text"] == expected
        assert server.http.get("/health").json()["status"] == "ok"
        server.check_idle()

    def test_requests_end_with_the_tokens_that_they_have(self, server):
        """SE-5: a stream ends in order, with a last part; what was not streamed is answered while it is paused."""
        with httpx.Client(base_url=server.url, timeout=PATIENCE) as client:
            with server.held():
                stream, _ = started(server, client, ignore_eos=True, logprobs=0, return_token_ids=True)
                seen = []
                fields = {"max_tokens": 40, "ignore_eos": True, "n": 2, "temperature": 1}
                whole = threading.Thread(target=lambda: seen.append(tokens(server, **fields)))
                whole.start()
                while ask(server, "GET", "/load").json()["running"] < 3:
                    pass
                assert ask(server, "POST", "/pause?mode=abort").json() == {"is_paused": True, "ended": 3}
            events = [json.loads(line[6:]) for line in stream if line.startswith("data: {")]
            whole.join(PATIENCE)
        assert server.serving.requests.is_paused
        choices = [one["choices"][0] for one in events if one["choices"]]
        assert choices[-1]["finish_reason"] == "abort"
        assert all(len(one["token_ids"]) == len(one["logprobs"]["tokens"]) for one in choices if one["logprobs"])
        assert [one["finish_reason"] for one in seen[0]["choices"]] == ["abort", "abort"]
        assert 0 < seen[0]["usage"]["completion_tokens"] < 80


class TestAbort:
    def test_one_answer_by_its_id(self, server):
        """SE-5, EX-8: the aborted request's client gets an error, its memory is free, and its neighbour goes on."""
        with httpx.Client(base_url=server.url, timeout=PATIENCE) as client:
            with server.held():
                stream, name = started(server, client, ignore_eos=True)
                other, _ = started(server, client, ignore_eos=True)
                assert ask(server, "POST", "/abort", json={"request_id": name}).json() == {"aborted": 1}
            assert "an administrator has ended this request" in "".join(stream)
            assert "[DONE]" in "".join(other)
        server.wait_until(lambda: not server.engine.has_unfinished_requests())
        server.check_idle()
        error = check_error(ask(server, "POST", "/abort", json={"request_id": name}), 404)
        assert (error["param"], error["code"]) == ("request_id", "request_not_found")


class TestUpdate:
    def test_new_weights(self, server):
        """SE-5, PY-6: tokens are those of the new weights, and nothing of the old ones is matched; and back again."""
        old = tokens(server)
        assert tokens(server)["usage"]["prompt_tokens_details"]["cached_tokens"] == 32
        answer = ask(server, "POST", "/update_weights_from_disk", json={"model_path": "new"}).json()
        assert answer["success"] is True
        assert answer["weights_version"] == server.engine.core.weights_version
        weights = server.serving.weights_hash
        new = tokens(server)
        assert new["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        expected = tiny_engine_with(build_slow_decay(TWO_LAYERS, seed=6))
        assert new["choices"][0]["text"] == expected != old["choices"][0]["text"]
        ask(server, "POST", "/sleep")
        absolute = str(server.serving.updater.root.path / "old")
        assert ask(server, "POST", "/update_weights_from_disk", json={"model_path": absolute}).status_code == 200
        ask(server, "POST", "/wake_up")
        assert tokens(server)["choices"] == old["choices"]
        assert server.serving.weights_hash not in ("-", weights)

    async def test_one_after_the_other(self, tmp_path, monkeypatch):
        """TE-6: a checkpoint is not read, which takes the memory of a second model, before the last one is written."""
        happened, second = [], threading.Event()

        def read(updater: WeightsUpdater, path: str) -> tuple[Callable[[], int], str]:
            happened.append(f"read {path}")
            if path == "two":
                second.set()
            while not (second.is_set() or updater._one_at_a_time._waiters):  # until the second one reads or waits
                time.sleep(0.001)
            return (lambda: 1), f"hash of {path}"

        def change_weights(*_: object) -> Future[int]:
            happened.append("written")
            done: Future[int] = Future()
            done.set_result(1)
            return done

        monkeypatch.setattr(WeightsUpdater, "_read", read)
        updater = WeightsUpdater(WeightsRoot.of(str(tmp_path)), SimpleNamespace(change_weights=change_weights))
        await asyncio.gather(*(updater.update(path) for path in ("one", "two")))
        assert happened == ["read one", "written", "read two", "written"]
        assert updater.weights_hash == "hash of two"

    @pytest.mark.parametrize("in_flight", [None, "continue", "finish", "abort"])
    def test_requests_in_flight(self, server, in_flight):
        """RL-2, RL-3: they compute again, go on, end first or end with an error; parts of answers have versions."""
        before = server.engine.core.weights_version
        body = {"model_path": "new", "weights_version": before + 7}
        body |= {} if in_flight is None else {"in_flight": in_flight}
        answers: list[httpx.Response] = []
        updating = threading.Thread(
            target=lambda: answers.append(ask(server, "POST", "/update_weights_from_disk", json=body))
        )
        with httpx.Client(base_url=server.url, timeout=PATIENCE) as client:
            with server.held():
                stream, _ = started(server, client, ignore_eos=True, return_weights_version=True)
                updating.start()
                server.wait_until(lambda: answers or server.serving.requests.client._idle_calls)
                assert bool(answers) is (in_flight != "finish")
            lines = [line.removeprefix("data: ") for line in stream if line]
        updating.join(PATIENCE)
        assert answers[0].json()["weights_version"] == before + 7 == server.engine.core.weights_version
        ask(server, "POST", "/update_weights_from_disk", json={"model_path": "old"})
        if in_flight == "abort":
            assert json.loads(lines[-1])["error"]["code"] == "request_aborted"
            return
        choices = [json.loads(line)["choices"][0] for line in lines[:-1]]
        versions, prefixes = (
            [version for one in choices for version, count in one[name] for _ in range(count)]
            for name in ("weights_version", "prefix_weights_version")
        )
        assert versions == sorted(versions)
        assert len(versions) == len(prefixes) >= 35
        assert {*versions} <= {before, before + 7}
        assert versions[-1] == (before if in_flight == "finish" else before + 7)
        assert prefixes == ([before] * len(versions) if in_flight == "continue" else versions)

    def test_a_write_that_fails(self, server, monkeypatch):
        """RL-1, SE-5: answers and health are 503 until weights are written; nothing of either version is cached."""

        def fail(*_: object) -> None:
            raise ZeroDivisionError("planted")

        with monkeypatch.context() as broken:
            broken.setattr(disk.NewWeights, "is_exact", False)  # as of quantized weights
            broken.setattr(disk, "restore_weights", fail)
            answer = ask(server, "POST", "/update_weights_from_disk", json={"model_path": "new"})
        assert check_error(answer, 503)["code"] == "weights_not_written"
        assert ask(server, "GET", "/health").status_code == 503
        refused = ask(server, "POST", "/v1/completions", json={"prompt": PROMPT})
        assert check_error(refused, 503)["code"] == "weights_not_written"
        assert server.engine.core.statistics().use.blocks_cached == 0
        assert ask(server, "POST", "/update_weights_from_disk", json={"model_path": "old"}).status_code == 200
        assert ask(server, "GET", "/health").status_code == 200
        assert tokens(server)["choices"]

    @pytest.mark.parametrize(
        ("path", "named"),
        [("spoilt", "has shape"), ("missing", "not a directory"), ("../x", "not below"), ("/etc", "not below")],
    )
    def test_refused_whole(self, server, path, named):
        """SE-5: the cache is unchanged by the refusal."""
        before = tokens(server)
        answer = ask(server, "POST", "/update_weights_from_disk", json={"model_path": path})
        assert named in check_error(answer, 400)["message"]
        again = tokens(server)
        assert again["choices"] == before["choices"]
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 32


def tiny_engine_with(model: torch.nn.Module) -> str:
    """Text of a plain engine around it, as the server's tokenizer writes it."""
    from megatron_ext.config import RequestParams
    from megatron_ext.text.tokenizer import NullTokenizer

    batching = BatchingConfig(block_size=16, block_count=40, max_requests=2)
    cache = CacheConfig(enable_prefix_caching=False)
    engine = build_engine(model, TWO_LAYERS, NullTokenizer(TWO_LAYERS.vocab_size), batching, cache, dtype=torch.float32)
    (record,) = engine.generate([PROMPT], RequestParams(num_tokens_to_generate=12))
    return record.generated_text


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/sleep?level=2", None, "level"),
        ("/sleep?mode=keep", None, "mode"),
        ("/sleep", {"level": 1}, "level"),
        ("/wake_up?tags=weights", None, "tags"),
        ("/flush_cache", {"what": 1}, "what"),
        ("/abort", {}, "abort_all"),
        ("/update_weights_from_disk", {"model_path": "new", "in_flight": "wait"}, "in_flight"),
        ("/update_weights_from_disk", {"model_path": "new", "weights_version": -1}, "weights_version"),
        ("/update_weights_from_disk", {"model_path": "new", "weights_version": 2**53}, "weights_version"),
        ("/abort", {"request_id": "a", "abort_all": True}, "either request_id or abort_all"),
        ("/abort", {"rid": "a"}, "rid"),
        ("/update_weights_from_disk", {"model_path": "new", "load_format": "auto"}, "load_format"),
        ("/update_weights_from_disk", {"model_path": ""}, "model_path"),
        ("/update_weights_from_disk", {"model_path": "a\ud800"}, "surrogate"),
        ("/update_weights_from_disk", {"model_path": "a\0"}, "not a valid path"),
        ("/update_weights_from_disk", {"model_path": "x" * 4000}, "x"),
        ("/update_weights_from_disk", {}, "model_path"),
    ],
)
def test_the_unknown_is_refused_by_name(server, path, body, named):
    options = {} if body is None else {"content": json.dumps(body), "headers": {"content-type": "application/json"}}
    assert named in check_error(ask(server, "POST", path, **options), 400)["message"]
    assert not server.serving.requests.is_asleep
