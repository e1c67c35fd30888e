"""SI-4, SI-5: a server explains to permitted clients why a prompt skipped no more, and lists its recent requests."""

from __future__ import annotations

import json

import pytest

from megatron_ext.commands import simulate as command
from megatron_ext.commands.simulate import ask_server
from megatron_ext.config import CacheConfig
from megatron_ext.server.monitoring.request_trace import RequestTrace
from megatron_ext.simulation.replay import simulate
from megatron_ext.simulation.settings import Machine, limits_of
from tests.unit_tests.offline.conftest import make_record
from tests.unit_tests.server.test_errors import check_error
from tests.unit_tests.support.driver import make_prompt
from tests.unit_tests.support.server import LiveServer, embedded_engine, tiny_engine

PATH = "/v1/completions"
FIRST = make_prompt(50, seed=11)


def parting_at(position: int) -> list[int]:
    return [*FIRST[:position], (FIRST[position] + 1) % 40, *FIRST[position + 1 :]]


OTHER = parting_at(25)  # in the second block of 16
FAST = Machine(flops=1e18, bytes=1e18, parameter_bytes=1, overhead=1e-9)


def explaining() -> CacheConfig:
    return CacheConfig(snapshot_slots=16, explain_prefix_cache=True)


@pytest.fixture(scope="module")
def server(serve) -> LiveServer:
    """Server with one key, which is the administrator's, and admin routes, so that clients may see everything."""
    return serve(tiny_engine(cache=explaining()), api_key="key", enable_admin_routes=True)


@pytest.fixture(scope="module")
def closed(serve) -> LiveServer:
    """Server with explanations but without routes for administrators."""
    return serve(tiny_engine(cache=explaining()), api_key="key")


def ask(server: LiveServer, prompt: object, *, key: str = "key", stream: bool = False, **fields: object) -> list[dict]:
    """The choices, streamed ones with the fields of all their parts."""
    body = {"prompt": prompt, "max_tokens": 3, "temperature": 0, "stream": stream, "explain_prefix_cache": True}
    response = server.http.post(PATH, json=body | fields, headers={"Authorization": f"Bearer {key}"})
    assert response.status_code == 200, response.text
    server.check_idle()
    if not stream:
        return response.json()["choices"]
    choices: dict[int, dict] = {}
    for line in response.text.splitlines():
        if line.startswith("data: {"):
            for one in json.loads(line[6:])["choices"]:
                choices.setdefault(one["index"], {}).update(one)
    return [choices[index] for index in sorted(choices)]


def texts(tokens: list[int]) -> str:
    """Return the text of tokens of the tiny model."""
    return "".join(f"<{token}>" for token in tokens)


@pytest.mark.parametrize("stream", [False, True])
class TestExplanations:
    @pytest.mark.parametrize("name", ["server", "closed"])
    def test_own_text_around_the_divergence(self, request, name, stream):
        """The prompt was sent as token ids; the explanation has their text, also for administrators, and no id."""
        server = request.getfixturevalue(name)
        server.reset_cache()
        for before in (FIRST, parting_at(20)):  # the second one leaves states at the divergence if missing
            ask(server, before)
        (said,) = [one["prefix_cache_explanation"] for one in ask(server, OTHER, stream=stream)]
        assert (said["reason"], said["agreeing"]) == ("parted", 25)
        assert (said["before"], said["after"]) == (texts(OTHER[:25])[-40:], texts(OTHER[25:])[:40])
        assert f"{said['before']}►{said['after']}" in said["text"]
        assert said["age"] >= 0
        assert said["advice"]
        assert not {"here", "there"} & said.keys()
        assert texts(FIRST[25:26]) not in json.dumps(said)

    def test_the_turn_before(self, server, stream):
        server.reset_cache()
        (turn,) = ask(server, FIRST[:40], return_token_ids=True)
        answered = [*FIRST[:40], *turn["token_ids"]]
        prompt = [*answered, *make_prompt(20, seed=3)]
        (said,) = [one["prefix_cache_explanation"] for one in ask(server, prompt, stream=stream)]
        assert (said["reason"], said["matched"], said["agreeing"]) == ("turn_ended", 32, 43)
        assert said["before"] == texts(answered)[-40:]
        assert "inside this block" in said["text"]

    @pytest.mark.parametrize("salts", [("a", "b"), (None, "b"), ("a", None)])
    def test_nothing_of_another_salt(self, server, stream, salts):
        """The explanation is equal to that on an empty cache: no reason, place or age shows the other requests."""
        first, second = salts
        said = []
        for others in ((), (FIRST, parting_at(20), FIRST[:18])):
            server.reset_cache()
            for prompt in others:
                ask(server, prompt, cache_salt=first)
            said += [one["prefix_cache_explanation"] for one in ask(server, FIRST, stream=stream, cache_salt=second)]
        assert said[0] == said[1]
        assert (said[1]["reason"], said[1]["age"], "before" in said[1]) == ("not_cached", None, False)


class TestWhoIsRefused:
    def test_a_server_that_hides_counts(self, serve):
        """The error is the same before and after another salt's request, and answers have no explanation."""
        hiding = serve(tiny_engine(cache=explaining()), hide_cache_counts=True)
        body = {"prompt": FIRST, "max_tokens": 1, "cache_salt": "b"}
        refused = []
        for _ in range(2):
            refused.append(check_error(hiding.http.post(PATH, json={**body, "explain_prefix_cache": True}), 400))
            answer = hiding.http.post(PATH, json={**body, "cache_salt": "a"})
            assert "explanation" not in answer.text
        assert "--hide-cache-counts" in refused[0]["message"]
        assert refused[0] == refused[1]


class TestWhereTheTextIs:
    def test_only_in_the_answer(self, serve, caplog):
        """Neither logs nor metrics, pages and other routes show the excerpt, or when its prefix was cached."""
        server = serve(embedded_engine(explain_prefix_cache=True), "embedded", api_key="key", enable_admin_routes=True)
        start = "The capital of Zanzibar is a city on the island of Unguja;"
        with caplog.at_level("DEBUG"):
            ask(server, f"{start} it is old, and its streets are narrow.", max_tokens=1)
            (choice,) = ask(server, f"{start} who lives there? Who 🎉 has lived there before?", max_tokens=1)
            said = choice["prefix_cache_explanation"]
            assert said["before"].endswith("Unguja;")
            assert said["after"].startswith(" who lives")
            paths = ("/", "/metrics", "/metrics/history", "/prefix_cache", "/prefix_cache/trace", "/health", "/docs")
            shown = [server.http.get(path, headers={"Authorization": "Bearer key"}).text for path in paths]
        for text in (*shown, caplog.text, repr([record.__dict__ for record in caplog.records])):
            assert not any(word in text for word in ("Unguja", "lives", "Zanzibar", '"age"'))


def test_near_misses_are_counted_by_reason_and_depth(closed):
    closed.reset_cache()
    for prompt in (FIRST, parting_at(20)):
        ask(closed, prompt)
    name, labels = "prefix_cache_near_misses_total", {"reason": "parted", "depth": "below 64"}
    ask(closed, OTHER)  # where there was none before there is no sample
    before = closed.metric(name, **labels)
    ask(closed, parting_at(30))
    ask(closed, make_prompt(40, seed=99))  # nothing of it was known
    assert closed.metric(name, **labels) == before + 1
    page = closed.http.get("/").text
    assert "near-misses" in page
    assert "prefix_cache_near_misses_total" in page


class TestTheRecentPast:
    def serve_some(self, server: LiveServer) -> int:
        """A conversation and others; tokens that were skipped."""
        server.reset_cache()
        before, prompt = server.metric("prompt_tokens_skipped_total"), list(FIRST)
        for seed in range(4):
            (choice,) = ask(server, prompt, return_token_ids=True)
            prompt += [*choice["token_ids"], *make_prompt(20, seed=seed)]
            ask(server, make_prompt(50, seed=50 + seed), enable_prefix_caching=seed != 3)
        ask(server, FIRST, cache_salt="other")
        return int(server.metric("prompt_tokens_skipped_total") - before)

    def test_simulated_with_the_servers_settings_it_skips_the_same(self, serve):
        """Answers go on in the next turns, and salts stay apart."""
        server = serve(tiny_engine(cache=explaining()), api_key="key")
        skipped = self.serve_some(server)
        assert skipped > 100
        running = ask_server(str(server.http.base_url).rstrip("/"), "key")
        assert len(running.turns) == 8  # without the one that opted out
        limits, slots = limits_of(running.costs, running.settings)
        assert (limits.total_blocks, slots) == (200, 16)
        outcome = simulate(running.turns, running.costs, running.settings, FAST)
        assert sum(outcome.skipped) == skipped

    @pytest.mark.parametrize(("max_requests", "max_tokens", "kept"), [(3, 1000, 3), (100, 45, 4), (100, 9, 0)])
    def test_bounded_by_requests_and_by_tokens(self, max_requests, max_tokens, kept):
        """TE-6: the oldest go first, and what has gone takes no room."""
        recent = RequestTrace(max_requests, max_tokens)
        for number in range(20):
            record = make_record(arrival_wall_time=float(number), prompt_tokens=(number,) * 8, generated_tokens=(1, 2))
            recent.note(record, None)
        assert [one.arrival for one in recent.snapshot()] == [20.0 - kept + at for at in range(kept)]

    def test_no_token_and_no_digest_leaves(self, closed):
        self.serve_some(closed)
        traces = [
            closed.http.get("/prefix_cache/trace", headers={"Authorization": "Bearer key"}).text for _ in range(2)
        ]
        lines = [[json.loads(line) for line in trace.splitlines()] for trace in traces]
        fields = {"time", "block_hashes", "block_size", "length", "answer_length", "answer_hashed"}
        assert all(set(line) == fields for line in lines[0])
        hashes = [{one for line in trace for one in line["block_hashes"]} for trace in lines]
        assert not hashes[0] & hashes[1]  # keyed with a secret that is not kept
        assert len(hashes[0]) == len(hashes[1])
        check_error(closed.http.get("/prefix_cache/trace"), 401)

    def test_other_memories_of_a_server(self, closed, tmp_path, capsys):
        """SI-4: the command plays the server's requests with half of its memory, all of it, and twice as much."""
        self.serve_some(closed)
        (tmp_path / "key").write_text("key\n")
        (tmp_path / "wrong").write_text("wrong\n")
        argv, output = ["--server", str(closed.http.base_url).rstrip("/"), "--policy", "lru"], tmp_path / "all.json"
        argv += ["--output", str(output), "--api-key-file"]
        assert command.main([*argv, str(tmp_path / "key")]) == 0
        half, own, twice = json.loads(output.read_text())["points"]
        assert (own["blocks"], own["slots"]) == (200, 16)
        assert (half["memory_gib"], twice["memory_gib"]) == (own["memory_gib"] / 2, own["memory_gib"] * 2)
        assert half["skipped_tokens"] <= own["skipped_tokens"] <= twice["skipped_tokens"]
        assert own["skipped_tokens"] > 100
        assert command.main([*argv, str(tmp_path / "wrong")]) == 2
        assert command.main(["--server", f"{argv[1]}/docs?"]) == 2
        refused, foreign = capsys.readouterr().err.splitlines()
        assert "answers 401" in refused
        assert "does not answer like a server of this package" in foreign
