"""SI-3, SI-4: generated and recorded traces, comparisons of a sweep, and the tool's output."""

from __future__ import annotations

import dataclasses
import json
from itertools import pairwise
from pathlib import Path

import pytest

from megatron_ext.commands import simulate
from megatron_ext.config import EvictionPolicyName
from megatron_ext.config.costs import EntryCosts
from megatron_ext.errors import ConfigError
from megatron_ext.scheduling.chunk import Chunk
from megatron_ext.simulation import command, fast_forward
from megatron_ext.simulation.cached_models import MODELS, SimulatedModel
from megatron_ext.simulation.command import alternating
from megatron_ext.simulation.formats import read_trace
from megatron_ext.simulation.generators import GENERATORS, Size
from megatron_ext.simulation.machine import Machine
from megatron_ext.simulation.replay import Outcome, Replay
from megatron_ext.simulation.sweep import GIB, Batch, Settings, advise, grid, limits_of, run_point, sweep
from megatron_ext.simulation.trace import Ids, Turn, by_session, cut
from megatron_ext.simulation.trace_formats.mooncake import BLOCK_SIZE
from tests.unit_tests.scheduling.builders import make_request

HYBRID, ATTENTION = MODELS["nemotron-h-8b"], MODELS["llama-3-8b"]
ROOMY = Settings(64.0, 0.5, 64, "lru")


def point(turns: list[Turn], settings: Settings = ROOMY, model: SimulatedModel = HYBRID):
    return run_point(turns, model, settings, Batch(), Machine())


class TestGenerators:
    @pytest.mark.parametrize("name", sorted(GENERATORS))
    def test_equal_seeds_give_equal_traces_of_whole_sessions(self, name: str):
        size = {"requests": 40, "scale": 0.05}
        first, again, other = (GENERATORS[name](Size(**size, seed=seed)) for seed in (1, 1, 2))
        assert first == again
        assert first != other
        assert len(first) >= 40
        for turns in by_session(first).values():
            assert not turns[0].is_reply
            assert all(turn.is_reply for turn in turns[1:])
        assert all(turn.prompt_length and len(turn.answer) for turn in first)

    def test_a_conversation_goes_on_from_its_answers(self):
        sessions = by_session(GENERATORS["chat"](Size(60, scale=0.05)))
        for turns in sessions.values():
            for before, turn in pairwise(turns):
                said = before.tokens() + tuple(before.answer)
                assert turn.tokens()[: len(said)] == said

    def test_agents_go_back(self):
        for turns in by_session(GENERATORS["agents"](Size(60, scale=0.05))).values():
            texts = [turn.tokens() + tuple(turn.answer) for turn in turns]
            if any(turn.tokens()[: len(said)] != said for turn, said in zip(turns[1:], texts, strict=False)):
                return
        raise AssertionError("not edited")

    def test_tenants_have_salts_and_samples_have_prompts_in_common(self):
        assert len({turn.salt for turn in GENERATORS["tenants"](Size(40, scale=0.05))}) > 5
        group = GENERATORS["rl"](Size(16, scale=0.05))[:8]
        assert len({turn.tokens() for turn in group}) == 1
        assert len({turn.answer for turn in group}) == 8

    def test_cut(self):
        assert cut((range(3), range(10, 15)), 5) == (range(3), range(10, 12))
        assert cut((range(3),), 0) == ()


class TestFiles:
    def read(self, tmp_path: Path, *lines: object, max_requests: int | None = None) -> list[Turn]:
        file = tmp_path / "trace.jsonl"
        file.write_text("\n".join(json.dumps(line) for line in lines) + "\n")
        return read_trace(file, max_requests)

    def test_tokens(self, tmp_path: Path):
        first = {"time": 0.5, "session": "a", "tokens": [1, 2, 3], "answer": [4, 5], "salt": "x"}
        second = {"time": 2, "session": "a", "reply": True, "tokens": [1, 2, 3, 4, 5, 6], "answer_length": 7}
        one, two = self.read(tmp_path, first, second)
        assert (one.tokens(), list(one.answer), one.time, one.salt) == ((1, 2, 3), [4, 5], 0.5, "x")
        assert (two.tokens(), len(two.answer), two.is_reply, two.session) == ((1, 2, 3, 4, 5, 6), 7, True, one.session)
        assert len(self.read(tmp_path, first, second, max_requests=1)) == 1

    def test_block_hashes(self, tmp_path: Path):
        """Equal blocks are equal tokens, of the length that is said."""
        lines = [
            {"time": 0, "block_hashes": ["a", "b"], "block_size": 4, "length": 7},
            {"time": 1, "block_hashes": ["a", "b", "c"], "block_size": 4},
        ]
        one, two = (turn.tokens() for turn in self.read(tmp_path, *lines))
        assert (len(one), len(two)) == (7, 12)
        assert one == two[:7]
        assert len(set(two)) == 12

    def test_mooncake(self, tmp_path: Path):
        """Times are milliseconds, and blocks have 512 tokens; tokens after the last hash are the request's own."""
        lines = [
            {"timestamp": 0, "input_length": 1100, "output_length": 20, "hash_ids": [0, 1]},
            {"timestamp": 2500, "input_length": 600, "output_length": 3, "hash_ids": [0, 9]},
        ]
        one, two = self.read(tmp_path, *lines)
        assert (one.prompt_length, len(one.answer), one.time) == (1100, 20, 0)
        assert (two.prompt_length, len(two.answer), two.time) == (600, 3, 2.5)
        assert one.tokens()[:BLOCK_SIZE] == two.tokens()[:BLOCK_SIZE]
        assert not set(one.tokens()[BLOCK_SIZE:]) & set(two.tokens()[BLOCK_SIZE:])

    @pytest.mark.parametrize(
        ("line", "words"),
        [
            ({"time": 0}, "line 1: a request needs either tokens or block_hashes, and not both"),
            ({"tokens": [1]}, "'time' is missing"),
            ({"time": 0, "tokens": []}, "empty"),
            ({"time": 0, "tokens": [-1]}, "line 1"),
            ({"time": 0, "tokens": [2**32 - 1]}, "too large"),
            ({"time": -1, "tokens": [1]}, "zero or more"),
            ({"time": 0, "tokens": [1], "session": "a", "reply": True}, "without an earlier request"),
            ({"time": 0, "tokens": [1], "sesion": "a"}, "unknown field 'sesion'"),
            ({"timestamp": 0, "input_length": 0, "output_length": 3, "hash_ids": [0]}, "input_length 0"),
            ([1], "not an object"),
        ],
    )
    def test_refuses_invalid_lines(self, tmp_path: Path, line: object, words: str):
        with pytest.raises(ConfigError, match=words):
            self.read(tmp_path, line)

    def test_an_empty_file(self, tmp_path: Path):
        (tmp_path / "none.jsonl").write_text("\n")
        with pytest.raises(ConfigError, match="no request"):
            read_trace(tmp_path / "none.jsonl")


class TestPoints:
    def test_from_which_request_on_a_shared_prefix_is_skipped(self):
        """Hybrids hit on the second request with opportunistic checkpoints, else on the third (SI-1)."""
        turns = alternating(512, 200, 12)
        assert point(turns, dataclasses.replace(ROOMY, placement="off")).skipped_tokens == 4 * 512
        assert point(turns).skipped_tokens == 8 * 512
        assert point(turns, model=ATTENTION).skipped_tokens == 8 * 512

    def test_equal_bytes(self):
        for share in (0.0, 0.2, 0.8):
            limits, slots = limits_of(HYBRID, Settings(4.0, share, 64, "lru"), Batch())
            taken = limits.total_blocks * limits.costs.block_bytes + slots * HYBRID.state_bytes
            assert 4 * GIB - limits.costs.block_bytes < taken <= 4 * GIB

    def test_memory_that_holds_nothing(self):
        with pytest.raises(ConfigError, match="hold no block"):
            limits_of(HYBRID, Settings(1e-4, 0.5, 64, "lru"), Batch())

    def test_a_too_long_request_is_refused_and_the_others_continue(self):
        found = point([*alternating(512, 64, 3), *alternating(10**6, 64, 1)], Settings(8.0, 0.5, 64, "lru"))
        assert (found.requests, found.refused) == (4, 1)

    def test_a_session_goes_on_after_a_turn_that_was_refused(self):
        """TE-6: the simulated client shortens its prompt."""
        ids = Ids()
        long, short, other = ids.take(10**6), ids.take(100), ids.take(100)
        turns = [
            Turn(0, 0.0, (long,), ids.take(1)),
            Turn(0, 1.0, (short,), ids.take(1), is_reply=True),
            Turn(1, 0.0, (other,), ids.take(1)),
        ]
        limits, slots = limits_of(HYBRID, Settings(8.0, 0.5, 64, "lru"), Batch())
        found = Replay(turns, limits, EvictionPolicyName.LRU, slots).run()
        assert found.refused == 1
        assert [one is None for one in found.ttft] == [True, False, False]

    def test_percentiles(self):
        """TE-6: percentiles cover the served turns."""
        found = Outcome([1] * 5, ttft=[4.0, None, 1.0, 3.0, 2.0])
        assert [found.ttft_percentile(percent) for percent in (0, 25, 50, 99, 100)] == [1.0, 2.0, 3.0, 4.0, 4.0]
        assert Outcome([1], ttft=[None]).ttft_percentile(50) == 0.0

    def test_simulated_time_needs_no_waiting(self):
        """Simulated time passes by the rates of the machine."""
        turns, fast, slow = alternating(512, 64, 4), Machine(flops=1e15), Machine(flops=1e13)
        waits = [run_point(turns, HYBRID, ROOMY, Batch(), machine).ttft_p50 for machine in (fast, slow)]
        assert waits[1] > 5 * waits[0]

    def test_a_step_takes_the_longer_of_compute_and_memory(self):
        costs = EntryCosts(block_size=4, token_flops=100, block_bytes=40, state_bytes=10)
        machine = Machine(flops=1000, bytes=100, parameter_bytes=50, overhead=1)
        prefill, decode = make_request(0, 8), make_request(1, 8, 1)
        decode.sequence.computed_end = 8
        assert machine.seconds([Chunk(prefill, 0, 8)], costs) == pytest.approx(1 + 800 / 1000)
        assert machine.seconds([Chunk(decode, 8, 9)], costs) == pytest.approx(1 + (50 + 90 + 10) / 100)

    def test_a_grid_runs_equal_points_once(self):
        """Runs that differ only in the share for states are equal without recurrent layers."""
        settings = grid([8.0], [0.2, 0.5], [64], ["lru"], ["kernel", "align"])
        points = list(sweep(alternating(512, 64, 8), ATTENTION, settings, Batch(), Machine()))
        assert len({one.wall_seconds for one in points}) == 1
        assert [one.settings for one in points] == settings

    def test_placements(self):
        """SI-1: without guesses the second request of a prefix skips nothing."""
        turns = Ids()
        prefixes = [turns.take(1216) for _ in range(12)]  # 19 blocks
        trace = [Turn(i, float(i), (prefixes[i // 2], turns.take(700)), turns.take(1)) for i in range(24)]
        settings = grid([64.0], [0.5], [64], ["lru"], ["kernel", "align"], ["even", "off"], [4, 8])
        points = list(sweep(trace, HYBRID, settings, Batch(), Machine()))
        skipped = {(p.settings.mode, p.settings.placement, p.settings.spacing): p.skipped_tokens for p in points}
        assert skipped["kernel", "off", 4] == 0
        assert skipped["kernel", "even", 4] == skipped["kernel", "even", 8] == 12 * 1024
        assert len({one for (mode, *_), one in skipped.items() if mode == "align"}) == 1
        taken = {(p.settings.placement, p.settings.spacing): p.provisional_taken for p in points[:4]}
        assert taken["even", 4] > taken["even", 8] > taken["off", 4] == 0


class Leaps(Replay):
    """Counts the steps that are planned."""

    planned = 0

    def step(self) -> None:
        """Run one more step."""
        self.planned += 1
        super().step()


class Walk(Replay):
    """Every step by itself."""

    def rest(self) -> None:
        """Let no request rest."""


def leap_and_walk(turns: list[Turn], limits, policy: str, slots: int | None) -> tuple[Outcome, Outcome, int]:
    """Check that a replay equals one step by step; return both outcomes, and the steps planned by the first."""
    leaps, walks = (kind(turns, limits, EvictionPolicyName(policy), slots) for kind in (Leaps, Walk))
    leaping, walking = leaps.run(), walks.run()
    leaps.scheduler.check()
    assert leaping.statistics == walking.statistics
    assert leaping.skipped == walking.skipped
    assert leaping.steps == walking.steps
    assert leaping.ttft == pytest.approx(walking.ttft)
    assert leaping.seconds == pytest.approx(walking.seconds)
    return leaping, walking, leaps.planned


@pytest.mark.parametrize("name", ["agents", "chat", "mixed", "rl"])
@pytest.mark.parametrize("policy", ["lru", "flops", "ref_zero"])
def test_steps_that_are_alike_are_taken_at_once(name: str, policy: str):
    """SI-3: results equal those step by step, request by request; times up to rounding."""
    turns = list(GENERATORS[name](Size(40, 3.0, 0.2, seed=5)))
    batch = Batch(max_requests=6, max_tokens=512)
    limits, slots = limits_of(HYBRID, Settings(0.6, 0.5, 64, policy), batch)
    limits = dataclasses.replace(limits, total_blocks=70)
    leaping, walking, planned = leap_and_walk(turns, limits, policy, slots)
    counters, use = leaping.statistics.counters, leaping.statistics.use
    assert use.blocks_evicted or counters.lost_slot_tokens or policy == "ref_zero" or name == "rl", "nothing was short"
    assert planned < 0.6 * walking.steps, "it hardly leaps"


def test_requests_pause_in_the_same_steps():
    """SI-3: where blocks are few, resting requests run on before any has to pause."""
    ids = Ids()
    turns = [Turn(i, 0.1 * i, (ids.take(100 + 10 * i),), ids.take(300 + 20 * i)) for i in range(12)]
    limits, slots = limits_of(HYBRID, ROOMY, Batch(max_requests=6, max_tokens=512))
    leaping, walking, planned = leap_and_walk(turns, dataclasses.replace(limits, total_blocks=20), "lru", slots)
    assert leaping.statistics.counters.pauses > 3
    assert leaping.statistics.counters.preemptions > 3
    assert planned < 0.9 * walking.steps


def test_a_leap_over_the_end_of_a_block_would_be_seen(monkeypatch: pytest.MonkeyPatch):
    uniform = fast_forward.uniform_steps
    longer = lambda request, size: uniform(request, size) and uniform(request, size) + 1  # noqa: E731
    monkeypatch.setattr(fast_forward, "uniform_steps", longer)
    with pytest.raises((AssertionError, IndexError)):
        test_steps_that_are_alike_are_taken_at_once("chat", "lru")


def test_a_moving_border_has_the_memory_of_a_split():
    """HY-5: slabs fill the memory, with either kind; a split needs a share."""
    costs = HYBRID.costs(64)
    limits, slots = limits_of(HYBRID, Settings(4.0, None, 64, "lru"), Batch())
    assert limits.slabs is not None
    assert (limits.total_blocks, slots) == (limits.slabs.blocks, limits.slabs.snapshot_slots)
    for filled in (limits.total_blocks * costs.block_bytes, slots * costs.state_bytes):
        assert 0.9 * 4 * GIB < filled <= 4 * GIB
    assert limits_of(HYBRID, Settings(4.0, 0.5, 64, "lru"), Batch())[0].slabs is None


def test_a_moving_border_skips_as_much_as_a_good_split():
    turns = GENERATORS["chat"](Size(requests=60))
    splits = [
        run_point(turns, HYBRID, Settings(2.0, share, 64, "lru"), Batch(), Machine()) for share in (0.3, 0.6, 0.9)
    ]
    moving = run_point(turns, HYBRID, Settings(2.0, None, 64, "lru"), Batch(), Machine())
    assert moving.skipped_tokens >= 0.95 * max(point.skipped_tokens for point in splits)
    assert min(point.skipped_tokens for point in splits) < 0.8 * moving.skipped_tokens


def test_advice_is_the_best_point_of_each_memory():
    """SI-4: compared with what is nearest to the defaults."""
    settings = grid([1.0, 3.0], [0.2, 0.6], [64, 256], ["lru", "flops"], ["kernel"])
    points = list(sweep(alternating(600, 200, 40), HYBRID, settings, Batch(), Machine()))
    advice = advise(points)
    assert [one.best.settings.memory_gib for one in advice] == [1.0, 3.0]
    for one in advice:
        here = [p for p in points if p.settings.memory_gib == one.best.settings.memory_gib]
        assert one.best.skipped_tokens == max(p.skipped_tokens for p in here)
        assert (one.given.settings.policy, one.given.settings.block_size) == ("lru", 64)
        assert one.given.settings.state_share == 0.2
        assert one.gain >= 1
        assert f"--inference-dynamic-batching-block-size {one.best.settings.block_size}" in one.flags
    assert advice[0].gain > 1


class TestTool:
    def run(self, *argv: str) -> int:
        return simulate.main(["--generate", "chat", "--requests", "20", "--scale", "0.2", *argv])

    def test_a_table_json_and_pictures(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ):
        pytest.importorskip("matplotlib")
        monkeypatch.setattr(command, "HEAT_LENGTHS", (128, 512))
        output, plots = tmp_path / "all.json", tmp_path / "plots"
        assert self.run("--memory-gib", "1,2", "--advise", "--output", str(output), "--plots", str(plots)) == 0
        shown = capsys.readouterr().out
        assert "flops" in shown
        assert "2 GiB:" in shown
        found = json.loads(output.read_text())
        assert [(one["settings"]["memory_gib"], one["settings"]["policy"]) for one in found["points"]] == [
            (1, "lru"),
            (1, "flops"),
            (2, "lru"),
            (2, "flops"),
        ]
        assert len(found["advice"]) == 2
        assert found["trace"]["requests"] >= 20
        assert {path.name for path in plots.iterdir()} == {
            "heat_map.png",
            "skipped_share.png",
            "ttft_p50.png",
            "ttft_p99.png",
        }

    def test_recorded_sessions_with_and_without_common_prefixes(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ):
        """SI-3: both are reported; prompts are longer than the model's limit, unless a flag keeps it."""
        requests = [{"t": 0, "in": 200_000, "out": 2, "hash_ids": [*range(3125)]}]
        session = {"block_size": 64, "tool_tokens": 9000, "system_tokens": 1000, "requests": requests}
        trace, output = tmp_path / "a.jsonl", tmp_path / "all.json"
        trace.write_text(2 * (json.dumps(session) + "\n"))
        argv = ["--trace", str(trace), "--rate", "0.01", "--memory-gib", "64", "--policy", "lru"]
        argv += ["--model", "llama-3-8b"]
        assert simulate.main([*argv, "--common-prefixes", "--output", str(output)]) == 0
        assert "With common prefixes" in capsys.readouterr().out
        found = json.loads(output.read_text())
        (without,), (common,) = found["points"], found["with_common_prefixes"]["points"]
        assert (without["refused"], without["skipped_tokens"]) == (0, 0)
        assert common["skipped_tokens"] == 156 * 64
        assert simulate.main([*argv, "--max-sequence-length", "131072", "--output", str(output)]) == 0
        assert json.loads(output.read_text())["points"][0]["refused"] == 2

    def test_mistakes_are_a_line(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
        assert simulate.main(["--trace", str(tmp_path / "none.jsonl")]) == 2
        assert self.run("--memory-gib", "0.00001") == 2
        with pytest.raises(SystemExit) as ended:
            self.run("--policy", "lfu")
        assert ended.value.code == 2
        assert "one of lru, ref_zero, flops" in capsys.readouterr().err
