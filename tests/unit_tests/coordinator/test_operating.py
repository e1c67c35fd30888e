"""RP-5: replicas join, drain and leave; what operators see and do works through the coordinator."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from dataclasses import fields

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from megatron_ext.config.routing import RoutingConfig
from megatron_ext.coordinator.coordination import ReplicaRow
from megatron_ext.coordinator.membership.fleet import Fleet
from megatron_ext.coordinator.membership.member import Status
from megatron_ext.coordinator.membership.replicas_file import ReplicasFile, read_replicas
from megatron_ext.errors import ConfigError
from megatron_ext.routing.router import Router
from tests.unit_tests.support.fleet import PATIENCE, FakeReplica, answers, coordinator, error, eventually, fleet

ADMIN = {"authorization": "Bearer the-admins"}


@pytest.fixture
def admin_key(tmp_path) -> str:
    (tmp_path / "admin").write_text("the-admins")
    return str(tmp_path / "admin")


class TestJoining:
    async def test_join_drain_and_leave(self, admin_key):
        async with fleet(1, admin_key_file=admin_key, enable_admin_routes=True) as (front, fakes):
            new = await FakeReplica(name="new").start()

            async def ask(action: str, url: object = new.url, **fields: object):
                body = {"url": url, **fields}
                return await front.http.post(f"/replicas/{action}", json=body, headers=ADMIN)

            assert (await ask("join")).json() == {"url": new.url, "status": "joining"}
            await front.until(new, Status.READY)
            release = asyncio.Event()

            async def waits(fake, exchange):
                fake.beat["steps"] += 1
                await release.wait()
                await answers(fake, exchange)

            new.behave = waits
            asking = [asyncio.ensure_future(front.complete([n] * 9)) for n in range(4)]
            await eventually(lambda: len(new.requests) == 2)
            assert (await ask("drain")).json() == {"url": new.url, "in_flight": 2}
            assert front.status(new) is Status.DRAINING
            assert {(await front.complete([n] * 9)).json()["by"] for n in range(4)} == {fakes[0].name}
            release.set()
            assert {one.json()["by"] for one in await asyncio.gather(*asking)} == {"new", fakes[0].name}
            await ask("join")
            assert front.status(new) is Status.READY, "it takes requests again"
            release.clear()
            asking = [asyncio.ensure_future(front.complete([10 + n] * 5)) for n in range(2)]
            await eventually(lambda: len(new.requests) == 3)
            assert (await ask("leave")).json() == {"url": new.url, "in_flight": 1}
            moved = {one.json()["by"] for one in await asyncio.gather(*asking)}
            assert moved == {fakes[0].name}, "what was in flight runs elsewhere"
            assert list(front.coordination.fleet.members) == [fakes[0].url]
            assert new.url not in (await front.http.get("/metrics")).text
            assert (await ask("leave")).status_code == 404
            for url, more in ((5, {}), ("https://a", {}), ("http://a/b", {}), (new.url, {"x": 1})):
                assert (await ask("join", url, **more)).status_code == 400
            assert (await front.http.post("/replicas/join", json={"url": new.url})).status_code == 401
            await new.stop()

    async def test_a_drained_replica_that_is_restarted_takes_requests_again(self):
        """A rolling restart: drain, restart at the same address. A replica that is to leave stays drained."""
        async with fleet(2, replica_timeout=0.5) as (front, fakes):
            members = front.coordination.fleet
            members.drain(fakes[0].url)
            members.drain(fakes[1].url)
            members.members[fakes[1].url].leaves_when_idle = True
            for fake in fakes:
                fake.is_frozen = True
                await front.until(fake, Status.DEAD)
                fake.restart()
                fake.is_frozen = False
            await front.until(fakes[0], Status.READY)
            await front.until(fakes[1], Status.DRAINING)
            assert (await front.complete()).json()["by"] == fakes[0].name

    async def test_no_replica_joins_by_http_without_the_flag(self):
        async with fleet(1) as (front, _):
            assert (await front.http.post("/replicas/join", json={"url": "http://a"})).status_code == 404

    async def test_the_file_is_read_again(self, tmp_path, monkeypatch, caplog):
        monkeypatch.setattr("megatron_ext.coordinator.membership.replicas_file.INTERVAL", 0.02)
        first, second = [await FakeReplica(name=name).start() for name in ("first", "second")]
        file = tmp_path / "replicas"
        file.write_text(f"# ours\n{first.url}\n\n")
        async with coordinator(replicas_file=str(file)) as front:
            members = front.coordination.fleet.members
            assert list(members) == [first.url]
            file.write_text(f"{first.url}\n{second.url}\n")
            await eventually(lambda: second.url in members)
            await front.until(second, Status.READY)
            file.write_text("http://not a host\n")
            await eventually(lambda: "the replicas are unchanged" in caplog.text)
            file.unlink()
            await asyncio.sleep(0.1)
            assert set(members) == {first.url, second.url}
            file.write_text(f"{second.url}\n")
            await eventually(lambda: list(members) == [second.url])
            assert (await front.complete()).json()["by"] == "second"
        for fake in (first, second):
            await fake.stop()

    async def test_a_replica_of_a_flag_stays_when_the_file_does_not_name_it(self, tmp_path):
        """TE-6: the file takes away what it brought."""
        first, second = [await FakeReplica(name=name).start() for name in ("first", "second")]
        file = tmp_path / "replicas"
        file.write_text(f"{first.url}\n{second.url}\n")
        async with coordinator(first, replicas_file=str(file)) as front:
            fleet = front.coordination.fleet
            assert set(fleet.members) == {first.url, second.url}
            file.write_text("# none\n")
            front.coordination._file.look()
            assert list(fleet.members) == [first.url]
            assert not fleet.members[first.url].is_draining
        for fake in (first, second):
            await fake.stop()

    async def test_a_mistake_in_the_file_is_said_once(self, tmp_path, caplog):
        """TE-6: the mistake is reported once until the file changes again."""
        file = tmp_path / "replicas"
        file.write_text("")
        watched = ReplicasFile(str(file), Fleet(Router(RoutingConfig()), 5.0))
        for text in ("http://not a host\n", "ftp://another mistake\n"):
            file.write_text(text)
            for _ in range(3):
                watched.look()
        assert caplog.text.count("the replicas are unchanged") == 2

    @pytest.mark.parametrize(
        ("text", "problem"),
        [
            ("http://a\nftp://b", "line 2: 'ftp://b' is not the URL"),
            ("http://a\nhttp://a", "line 2: 'http://a' is listed twice"),
        ],
    )
    def test_mistakes_in_the_file(self, tmp_path, text, problem):
        (tmp_path / "replicas").write_text(text)
        with pytest.raises(ConfigError, match=re.escape(problem)):
            read_replicas(str(tmp_path / "replicas"))

    async def test_another_server_does_not_join(self):
        """Another server at the address, or one with an invalid status, is reported to clients that look."""
        strange = await FakeReplica(beat={"block_size": 0}).start()
        async with coordinator(strange) as front:
            assert front.status(strange) is Status.JOINING
            told = (await front.http.get("/replicas")).json()["replicas"][0]
            assert "does not return a replica's answer" in told["problem"]
            assert (await front.http.get("/health")).status_code == 503
        await strange.stop()


class TestObserving:
    async def test_metrics_are_per_replica(self):
        async with fleet(2) as (front, fakes):
            await front.complete([1] * 40)
            text = (await front.http.get("/metrics")).text
            samples = {
                (sample.name.removeprefix("megatron_ext_coordinator_"), sample.labels.get("replica")): sample.value
                for family in text_string_to_metric_families(text)
                for sample in family.samples
                if "le" not in sample.labels
            }
            chosen, other = fakes if fakes[0].requests else fakes[::-1]
            for fake in fakes:
                assert samples["prompt_tokens_skipped_total", fake.url] == 5
                assert samples["prompt_tokens_computed_total", fake.url] == 7
                assert samples["in_flight", fake.url] == 0
                assert samples["replica_ready", fake.url] == 1
            assert samples["decision_seconds_count", chosen.url] == samples["requests_sent_total", chosen.url] == 1
            assert ("decision_seconds_count", other.url) not in samples
            assert samples["blocks_known", chosen.url] == 10

    async def test_status_page_and_its_data(self):
        async with fleet(2) as (front, fakes):
            page = await front.http.get("/")
            assert "script-src 'sha256-" in page.headers["content-security-policy"]
            assert not re.search(r"(?:src|href)=\"?http", page.text)
            told = (await front.http.get("/replicas")).json()
            assert told["policy"] == "least_computed"
            assert [one["url"] for one in told["replicas"]] == [fake.url for fake in fakes]
            assert set(told["replicas"][0]) == {one.name for one in fields(ReplicaRow)}, "fields that the page draws"
            health = await front.http.get("/health")
            assert health.json() == {"status": "ok", "replicas": {"ready": 2}, "weights_versions": {}}
            assert (await front.http.get("/load")).json() == {"server_load": 0, "capacity": 16}
            paths = (await front.http.get("/openapi.json")).json()["paths"]
            assert {"/v1/chat/completions", "/replicas", "/abort"} < set(paths)
            assert (await front.http.get("/docs")).status_code == 200

    async def test_a_replica_that_sleeps_gets_nothing(self):
        async with fleet(2) as (front, fakes):
            fakes[0].beat["status"] = "asleep"
            await front.until(fakes[0], Status.ASLEEP)
            assert {(await front.complete([n])).json()["by"] for n in range(4)} == {fakes[1].name}
            load = (await front.http.get("/load")).json()
            assert load == {"server_load": 0, "capacity": 8}, "TE-6: what sleeps takes no requests"

    async def test_a_paused_replica_gets_requests_only_if_all_are_paused(self):
        """RP-4: requests go elsewhere, and wait where no other replica is left; it is not taken for a hung one."""
        async with fleet(2, replica_timeout=1.0) as (front, fakes):
            fakes[0].beat["status"] = "paused"
            await front.until(fakes[0], Status.PAUSED)
            assert {(await front.complete([n])).json()["by"] for n in range(4)} == {fakes[1].name}
            fakes[1].beat["status"] = "paused"
            await front.until(fakes[1], Status.PAUSED)
            answer = await front.complete([1, 2])
            assert answer.status_code == 200
            health = (await front.http.get("/health")).json()
            assert (health["status"], health["replicas"]) == ("ok", {"paused": 2})


class TestLog:
    @pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "streamed"])
    async def test_a_request_has_its_id_its_replica_and_the_tokens_skipped(self, caplog, is_stream):
        """Both for whole answers and for streams, whose usage is in the last event."""
        caplog.set_level(logging.INFO, "megatron_ext")
        usage = b'"usage": {"completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 36}}'

        async def behave(fake, exchange):
            exchange.head(200, "text/event-stream" if is_stream else "application/json")
            if is_stream:
                exchange.data(b'data: {"id": "cmpl-1", "choices": [{"text": "\\"id\\": \\"x\\""}]}\n\n')
                exchange.data(b'data: {"id": "cmpl-1", %s}\n\n' % usage)
            else:
                exchange.data(b'{"id": "cmpl-1", %s}' % usage)
            exchange.end()

        async with fleet(2, access_log=True) as (front, fakes):
            await front.complete([1] * 40)
            chosen = fakes[0] if fakes[0].requests else fakes[1]
            other = next(fake for fake in fakes if fake is not chosen)
            for fake in fakes:
                fake.behave = behave
            await front.complete([1] * 40, stream=is_stream)
            chosen.behave = error(503)
            await front.complete([1] * 40, stream=is_stream)
            assert (await front.complete([1] * 40, model="unknown")).status_code == 404
        lines = [one.getMessage() for one in caplog.records if one.name == "megatron_ext.server.access"]
        texts = [re.sub(r" duration=[\d.]+$", "", line) for line in lines if "/v1/completions" in line]
        path = "POST /v1/completions"
        assert texts == [
            f"- {path} 200 replica={chosen.url} skipped=- expected=0",
            f"cmpl-1 {path} 200 replica={chosen.url} skipped=36 expected=39",
            f"cmpl-1 {path} 200 replica={other.url} skipped=36 expected=0 tries=2",
            f"- {path} 404",
        ]


class TestThroughIt:
    async def test_one_answers_for_all(self):
        async with fleet(2) as (front, fakes):
            for method, path in (("GET", "/v1/models"), ("GET", "/v1/models/a%2Fb"), ("POST", "/detokenize")):
                body = {} if method == "GET" else {"json": {"tokens": [1]}}
                assert (await front.http.request(method, path, **body)).json()["by"].startswith("fake")
            routed = [one.path for fake in fakes for one in fake.others if one.path != "/replica"]
            assert routed == ["/v1/models", "/v1/models/a%2Fb", "/detokenize"]
            await fakes[0].stop()
            assert (await front.http.get("/v1/models")).json()["by"] == fakes[1].name

    async def test_the_idlest_one_answers_for_all(self):
        """TE-6: a replica with requests in flight is not asked for what another one can say."""

        async def never(fake, exchange):
            await asyncio.sleep(PATIENCE)

        async with fleet(2) as (front, fakes):
            for fake in fakes:
                fake.behave = never
            asking = asyncio.ensure_future(front.complete([1]))
            await eventually(lambda: any(fake.requests for fake in fakes))
            idle = next(fake for fake in fakes if not fake.requests)
            assert {(await front.http.get("/v1/models")).json()["by"] for _ in range(3)} == {idle.name}
            asking.cancel()

    async def test_an_abort_finds_its_replica(self):
        async with fleet(2) as (front, fakes):
            fakes[0].statuses["/abort"] = 404
            answer = await front.http.post("/abort", json={"request_id": "x"})
            assert answer.status_code == 200
            assert answer.json()["replicas"][fakes[1].url] == {"by": "fake 1"}
            assert fakes[1].others[-1].body == {"request_id": "x"}
            fakes[1].statuses["/abort"] = 404
            answer = await front.http.post("/abort", json={"request_id": "x"})
            assert (answer.status_code, answer.json()["error"]["message"]) == (404, "no")

    async def test_broadcasts_require_the_admin_key(self, admin_key):
        async with fleet(1, admin_key_file=admin_key, api_key="k") as (front, fakes):
            for path in ("/replicas", "/prefix_cache"):
                assert (await front.http.get(path)).status_code == 401
                assert (await front.http.get(path, headers={"authorization": "Bearer k"})).status_code == 403
                assert (await front.http.get(path, headers=ADMIN)).status_code == 200
            assert fakes[0].others[-1].headers["authorization"] == "Bearer the-admins"
            for path in ("/health", "/metrics", "/", "/version"):
                assert (await front.http.get(path)).status_code == 200

    async def test_pages_of_others_stay_outside(self):
        async with fleet(1) as (front, _):
            for headers in ({"host": "evil.example"}, {"origin": "https://evil.example"}):
                assert (await front.complete(headers=headers)).status_code == 403


@pytest.mark.parametrize("ends", [True, False], ids=["in time", "too late"])
async def test_requests_end_before_the_coordinator_does(ends: bool):
    """Requests end before the coordinator; those that take too long get an error."""
    may_end = asyncio.Event()

    async def slowly(fake, exchange):
        await may_end.wait()
        await answers(fake, exchange)

    async def end_the_request(url: str) -> None:
        """End the request after the coordinator has begun to end: it accepts no connections any more."""
        with contextlib.suppress(httpx.TransportError):
            while True:
                async with httpx.AsyncClient(timeout=PATIENCE) as other:
                    await other.get(f"{url}/health")
        may_end.set()

    fake = await FakeReplica(behave=slowly).start()
    async with httpx.AsyncClient(timeout=PATIENCE) as client:
        async with coordinator(fake, shutdown_timeout=PATIENCE if ends else 0.1) as front:
            asking = asyncio.ensure_future(client.post(f"{front.url}/v1/completions", json={"prompt": "one"}))
            await eventually(lambda: len(fake.requests) == 1)
            ending = asyncio.ensure_future(end_the_request(front.url)) if ends else None
        answer = await asking
    assert ending is None or ending.done()
    assert answer.status_code == (200 if ends else 503)
    assert ends or answer.json()["error"]["code"] == "replica_lost"
    await fake.stop()


async def test_a_request_that_has_no_replica_yet_counts_at_shutdown(caplog):
    """The line at the beginning of a shutdown counts requests whose prompts are being tokenized."""
    caplog.set_level(logging.INFO, "megatron_ext")
    fakes = [await FakeReplica(name=name).start() for name in ("one", "two")]
    async with httpx.AsyncClient(timeout=PATIENCE) as client:

        async def thaw() -> None:
            await eventually(lambda: "shutdown begins: 1 requests in flight" in caplog.text)
            for fake in fakes:
                fake.is_frozen = False

        async with coordinator(*fakes, shutdown_timeout=PATIENCE) as front:
            for fake in fakes:
                fake.is_frozen = True
            body = {"prompt": "text"}
            asking = asyncio.ensure_future(client.post(f"{front.url}/v1/completions", json=body))
            await eventually(lambda: any(one.path == "/tokenize" for fake in fakes for one in fake.others))
            thawing = asyncio.ensure_future(thaw())
        await thawing
        assert (await asking).status_code == 200
    for fake in fakes:
        await fake.stop()
