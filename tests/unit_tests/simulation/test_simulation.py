"""SI-3, SI-4: recorded traces, replays, and the command's output."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_ext.commands import simulate as command
from megatron_ext.config import EvictionPolicyName, ModelConfig
from megatron_ext.config.costs import EntryCosts, entry_costs
from megatron_ext.errors import ConfigError
from megatron_ext.scheduling.chunk import Chunk
from megatron_ext.simulation.formats import BLOCK_SIZE, read_trace
from megatron_ext.simulation.replay import Outcome, Replay, simulate
from megatron_ext.simulation.settings import GIB, MODELS, Machine, Settings, limits_of
from megatron_ext.simulation.trace import Ids, Turn
from tests.unit_tests.scheduling.builders import make_request

HYBRID, ATTENTION = MODELS["nemotron-h-8b"], MODELS["llama-3-8b"]

SHAPE = {"hidden_size": 4096, "num_attention_heads": 32, "num_query_groups": 8, "kv_channels": 128}
LAYERS = {
    "nemotron-h-8b": ModelConfig(
        hybrid_override_pattern="M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
        ffn_hidden_size=21504,
        mamba_state_dim=128,
        mamba_head_dim=64,
        mamba_num_heads=128,
        mamba_num_groups=8,
        squared_relu=True,
        **SHAPE,
    ),
    "llama-3-8b": ModelConfig(hybrid_override_pattern="*-" * 32, ffn_hidden_size=14336, swiglu=True, **SHAPE),
}


@pytest.mark.parametrize("name", MODELS)
def test_costs_of_a_model_follow_from_its_layers(name):
    """Keys, values and convolution states of 16 bits; recurrent states of 32."""
    config = LAYERS[name]
    pattern = config.hybrid_override_pattern
    channels = config.mamba_heads * config.mamba_head_dim + 2 * config.mamba_num_groups * config.mamba_state_dim
    state = 4 * config.recurrent.state_size(config) + 2 * channels * (config.mamba_conv_kernel - 1)
    kv = 2 * 2 * pattern.count("*") * config.query_groups * config.head_channels
    assert MODELS[name] == entry_costs(config, 64, 64 * kv, pattern.count("M") * state)


ROOMY = Settings(64.0, 0.5)


def skipped(turns: list[Turn], settings: Settings = ROOMY, costs: EntryCosts = HYBRID) -> int:
    return sum(simulate(turns, costs, settings).skipped)


def alternating(shared: int, own: int, count: int = 32) -> list[Turn]:
    """Requests a second apart whose first tokens are one of four prefixes in turn, the rest unique."""
    ids = Ids()
    prefixes = [ids.take(shared) for _ in range(4)]
    return [Turn(i, float(i), (prefixes[i % 4], ids.take(own)), ids.take(1)) for i in range(count)]


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
            ({"time": 0, "tokens": [2**32 - 1]}, "token 4294967295"),
            ({"time": 0, "tokens": [1], "session": "a", "reply": True}, "without an earlier request"),
            ({"time": 0, "tokens": [1], "sesion": "a"}, "unknown field 'sesion'"),
            ({"timestamp": 0, "input_length": 0, "output_length": 3, "hash_ids": [0]}, "input_length 0"),
        ],
    )
    def test_refuses_invalid_lines(self, tmp_path: Path, line: object, words: str):
        with pytest.raises(ConfigError, match=words):
            self.read(tmp_path, line)


class TestReplays:
    def test_from_which_request_on_a_shared_prefix_is_skipped(self):
        """Hybrids hit on the second request with opportunistic checkpoints, else on the third (SI-1)."""
        turns = alternating(512, 200, 12)
        assert skipped(turns, Settings(64.0, 0.5, provisional_slots=0)) == 4 * 512
        assert skipped(turns) == 8 * 512
        assert skipped(turns, costs=ATTENTION) == 8 * 512

    def test_equal_bytes(self):
        for share in (0.0, 0.2, 0.8):
            limits, slots = limits_of(HYBRID, Settings(4.0, share))
            taken = limits.total_blocks * limits.costs.block_bytes + slots * limits.costs.state_bytes
            assert 4 * GIB - limits.costs.block_bytes < taken <= 4 * GIB

    def test_a_session_goes_on_after_a_turn_that_was_refused(self):
        """TE-6: the simulated client shortens its prompt; other requests are served."""
        ids = Ids()
        long, short, other = ids.take(10**6), ids.take(100), ids.take(100)
        turns = [
            Turn(0, 0.0, (long,), ids.take(1)),
            Turn(0, 1.0, (short,), ids.take(1), is_reply=True),
            Turn(1, 0.0, (other,), ids.take(1)),
        ]
        found = simulate(turns, HYBRID, Settings(8.0, 0.5, max_sequence_length=131_072))
        assert found.refused == 1
        assert [one is None for one in found.ttft] == [True, False, False]

    def test_percentiles(self):
        """TE-6: percentiles cover the served turns."""
        found = Outcome([1] * 5, ttft=[4.0, None, 1.0, 3.0, 2.0])
        assert [found.ttft_percentile(percent) for percent in (0, 25, 50, 99, 100)] == [1.0, 2.0, 3.0, 4.0, 4.0]
        assert Outcome([1], ttft=[None]).ttft_percentile(50) == 0.0

    def test_a_step_takes_the_longer_of_compute_and_memory(self):
        costs = EntryCosts(block_size=4, token_flops=100, block_bytes=40, state_bytes=10)
        machine = Machine(flops=1000, bytes=100, parameter_bytes=50, overhead=1)
        prefill, decode = make_request(0, 8), make_request(1, 8, 1)
        decode.computed_end = 8
        assert machine.seconds([Chunk(prefill, 0, 8)], costs) == pytest.approx(1 + 800 / 1000)
        assert machine.seconds([Chunk(decode, 8, 9)], costs) == pytest.approx(1 + (50 + 90 + 10) / 100)

    @pytest.mark.parametrize("policy", ["lru", "ref_zero"])
    def test_requests_are_served_though_blocks_are_few(self, policy: str):
        """SI-3: requests pause and are preempted, and all of them end."""
        ids = Ids()
        turns = [Turn(i, 0.1 * i, (ids.take(100 + 10 * i),), ids.take(300 + 20 * i)) for i in range(12)]
        memory = 20 * ATTENTION.block_bytes / GIB
        limits, slots = limits_of(ATTENTION, Settings(memory, max_requests=6, max_tokens=512))
        assert (limits.total_blocks, slots) == (20, None)
        replay = Replay(turns, limits, EvictionPolicyName(policy), slots)
        found = replay.run()
        replay.scheduler.check()
        assert min(found.statistics.counters.pauses, found.statistics.counters.preemptions) > 3
        assert None not in found.ttft


def test_a_moving_border_has_the_memory_of_a_split():
    """HY-5: slabs fill the memory, with either kind; a split needs a share."""
    limits, slots = limits_of(HYBRID, Settings(4.0))
    assert limits.slabs is not None
    assert (limits.total_blocks, slots) == (limits.slabs.blocks, limits.slabs.slabs)
    for filled in (limits.total_blocks * HYBRID.block_bytes, slots * HYBRID.state_bytes):
        assert 0.9 * 4 * GIB < filled <= 4 * GIB
    assert limits_of(HYBRID, Settings(4.0, 0.5))[0].slabs is None


class TestCommand:
    """A table, JSON, and errors."""

    @pytest.fixture
    def trace(self, tmp_path: Path) -> Path:
        """Eight requests with four prefixes, and one that is longer than the model's limit."""
        path = tmp_path / "a.jsonl"
        lines = [{"time": i, "tokens": [*range(1000 * (i % 4), 1000 * (i % 4) + 512), 10**6 + i]} for i in range(8)]
        lines += [{"time": 9, "block_hashes": ["x"], "block_size": 200_000}]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return path

    def test_a_row_for_each_memory_and_policy(self, trace: Path, capsys: pytest.CaptureFixture[str]):
        """SI-3: equal columns in the table and in the file."""
        output = trace.with_name("all.json")
        argv = ["--trace", str(trace), "--policy", "lru,ref_zero", "--memory-gib", "16,32", "--output", str(output)]
        assert command.main(argv) == 0
        shown, found = capsys.readouterr().out.splitlines(), json.loads(output.read_text())
        assert found["trace"]["requests"] == 9
        points = found["points"]
        assert [(one["memory_gib"], one["policy"]) for one in points] == [
            (16, "lru"),
            (16, "ref_zero"),
            (32, "lru"),
            (32, "ref_zero"),
        ]
        assert [one["skipped_tokens"] for one in points] == [4 * 512, 0, 4 * 512, 0]
        assert points[0]["refused"] == 0, "the limit is as the trace needs"
        times = [points[0][f"ttft_p{percent}"] for percent in (50, 90, 95, 99)]
        assert 0 < times[0] < times[1] <= times[2] <= times[3]
        share = f"{points[0]['skipped_share']:.3f}"
        cells = ["16", "lru", "fcfs", str(points[0]["blocks"]), str(points[0]["slots"]), "0", share]
        assert shown[2].split()[:7] == cells
        assert shown[2].split()[-4:] == [f"{one:.3f}" for one in times]
        assert len(shown) == 6

    def test_schedule_policies_and_times(self, trace: Path):
        """SC-5: under load a warm request is earlier by its prefix, if its budget allows."""
        output = trace.with_name("all.json")
        argv = ["--trace", str(trace), "--policy", "lru", "--memory-gib", "16", "--max-requests", "1"]
        argv += ["--schedule-policy", "fcfs,lpm", "--time-scale", "1e-6", "--output", str(output)]
        points = []
        for budget in ("1000000", "0"):
            assert command.main([*argv, "--schedule-overtake-tokens", budget]) == 0
            points += json.loads(output.read_text())["points"]
        assert [(one["schedule_policy"], one["overtake_tokens"]) for one in points] == [
            ("fcfs", None),
            ("lpm", 10**6),
            ("fcfs", None),
            ("lpm", 0),
        ]
        waits = [one["ttft_p50"] for one in points]
        assert waits[1] < waits[0] == waits[2] == waits[3]

    def test_a_limit_of_length(self, trace: Path):
        output = trace.with_name("all.json")
        argv = ["--trace", str(trace), "--policy", "lru", "--memory-gib", "16"]
        argv += ["--max-sequence-length", "131072", "--output", str(output)]
        assert command.main(argv) == 0
        (point,) = json.loads(output.read_text())["points"]
        assert (point["refused"], point["skipped_tokens"]) == (1, 4 * 512)

    def test_mistakes_are_a_line(self, trace: Path, capsys: pytest.CaptureFixture[str]):
        assert command.main(["--trace", str(trace.with_name("none.jsonl"))]) == 2
        assert command.main(["--trace", str(trace), "--memory-gib", "0.00001"]) == 2
        assert command.main(["--trace", str(trace), "--plots", "here"]) == 2
        assert capsys.readouterr().err.count("\n") == 3
        with pytest.raises(SystemExit, match="2"):
            command.main(["--trace", str(trace), "--policy", "lfu"])
        assert "one of lru" in capsys.readouterr().err
