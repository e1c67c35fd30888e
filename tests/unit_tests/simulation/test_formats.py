"""SI-3, SI-7: recorded traces of every format, as files of every kind."""

from __future__ import annotations

import gzip
import json
import lzma
from pathlib import Path

import pytest

from benchmarks.simulation.truth import SESSIONS, TRACES
from megatron_ext.errors import ConfigError
from megatron_ext.prefix_cache import hash_chain
from megatron_ext.simulation import formats
from megatron_ext.simulation.formats import read_trace
from megatron_ext.simulation.replay import Outcome, Replay, simulate
from megatron_ext.simulation.settings import MODELS, Machine, Settings
from megatron_ext.simulation.trace import Turn, describe

MOONCAKE = TRACES / "mooncake_200.jsonl.gz"


def request(t: float, hashes: list[int], length: int | None = None, **more: object) -> dict[str, object]:
    """A request of a session with blocks of four tokens."""
    return {"t": t, "in": 4 * len(hashes) if length is None else length, "out": 3, "hash_ids": hashes, **more}


def session(*requests: dict[str, object]) -> dict[str, object]:
    """A session with blocks of four tokens."""
    return {"id": "x", "block_size": 4, "hash_id_scope": "local", "requests": list(requests)}


def write(path: Path, *lines: object) -> Path:
    """Write JSON lines."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


class TestFiles:
    """Files of every kind with the same sessions."""

    LINES = (session(request(0, [1, 2]), request(5, [1, 2, 3], think_time=2.5)), session(request(0, [1, 2], 9)))

    @pytest.mark.parametrize("suffix", ["", ".gz", ".xz"])
    def test_kinds_of_files(self, tmp_path: Path, suffix: str):
        expected = read_trace(write(tmp_path / "expected.jsonl", *self.LINES))
        compress = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}[suffix]
        path = tmp_path / f"a.txt{suffix}"
        path.write_bytes(compress("\n\n".join(map(json.dumps, self.LINES)).encode()))
        assert read_trace(path) == expected
        assert len(read_trace(path, 2)) == 2

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ('{"requests": [], "block_size": 4}\n\n{"a"\n', "line 3: not JSON"),
            ('{\n"requests": []}', "line 1: not JSON, an object a line"),
            ("\xff", "line 1: not JSON"),
            ('{"requests": [], "block_size": 4}', "no request"),
        ],
    )
    def test_an_invalid_object_is_named_by_its_line(self, tmp_path: Path, text: str, words: str):
        (tmp_path / "a.jsonl").write_text(text, "latin-1")
        with pytest.raises(ConfigError, match=words) as raised:
            read_trace(tmp_path / "a.jsonl")
        assert "\n" not in str(raised.value)

    @pytest.mark.parametrize("suffix", [".gz", ".xz"])
    def test_damaged_files(self, tmp_path: Path, suffix: str):
        whole = {".gz": gzip.compress, ".xz": lzma.compress}[suffix](json.dumps(self.LINES[0]).encode() * 9)
        for content in (whole[:-9], b"not compressed"):
            path = tmp_path / f"a.jsonl{suffix}"
            path.write_bytes(content)
            with pytest.raises(ConfigError, match="line 1: cannot be read or decompressed"):
                read_trace(path)

    def test_a_small_file_that_decompresses_to_a_large_one(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(formats, "LONGEST_LINE", 2**20)
        (tmp_path / "a.jsonl.xz").write_bytes(lzma.compress(b" " * 2**22))
        with pytest.raises(ConfigError, match=f"longer than {2**20} bytes"):
            read_trace(tmp_path / "a.jsonl.xz")


class TestSessions:
    """Sessions of agents."""

    def read(self, tmp_path: Path, *lines: object) -> list[Turn]:
        return read_trace(write(tmp_path / "a.jsonl", *lines))

    def test_hashes_are_local_to_a_session(self, tmp_path: Path):
        first, reply, other = self.read(
            tmp_path, session(request(0, [1, 2], 9), request(9, [1, 2, 3, 4], 18)), session(request(0, [1, 2], 9))
        )
        assert [turn.prompt_length for turn in (first, reply, other)] == [9, 18, 9]
        assert first.tokens()[:8] == reply.tokens()[:8]
        assert len({*reply.tokens(), first.tokens()[8]}) == 19, "what follows the last complete block is unique"
        assert not {*first.tokens(), *reply.tokens()} & {*other.tokens()}
        assert not {*first.answer} & {*reply.answer}
        assert len(first.answer) == 3

    def test_replies_come_after_their_pause(self, tmp_path: Path):
        first, second, third = self.read(
            tmp_path, session(request(0, [1]), request(9, [1, 2], think_time=2.5), request(12, [1, 2]))
        )
        assert [turn.is_reply for turn in (first, second, third)] == [False, True, True]
        assert (second.time, third.time) == (2.5, 0.0)

    def test_starts_are_a_poisson_process(self, tmp_path: Path):
        path = write(tmp_path / "a.jsonl", *(session(request(0, [1])) for _ in range(400)))
        starts = [turn.time for turn in read_trace(path, rate=4.0)]
        assert starts == sorted(starts)
        assert 80 < starts[-1] < 125

    def test_sub_agents_run_beside_their_parent(self, tmp_path: Path):
        """Sub-agents share their parent's namespace, and start at their distance from the request before them."""
        agent = {"t": 7.0, "type": "subagent", "requests": [request(0.5, [1, 9]), request(3, [1, 9, 8], think_time=2)]}
        lines = session(request(0, [1]), request(5, [1, 2]), agent, request(8, [1, 2, 3], think_time=1))
        first, second, begun, nested, third = self.read(tmp_path, lines)
        assert first.session == second.session == third.session != begun.session == nested.session
        assert begun.beside is second
        assert (begun.time, begun.is_reply) == (2.5, False)
        assert (nested.time, nested.is_reply, nested.beside) == (2.0, True, None)
        assert begun.tokens()[:4] == first.tokens()[:4]
        assert not {*begun.tokens()[4:]} & {*first.tokens()}
        assert describe([first, second, begun, nested, third])["sessions"] == 1

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"hash_id_scope": "global"}, "'global' is unknown"),
            ({"block_size": 0}, "block_size 0"),
            ({"requests": [request(0, [1]), {"t": 1, "requests": [{"t": 0}]}]}, "'in' is missing"),
            ({"requests": [request(5, [1]), request(4, [1])]}, "t 4 "),
            ({"requests": [request(0, [1]), request(4, [1], think_time=-1)]}, "think_time -1"),
        ],
    )
    def test_refuses_invalid_sessions(self, tmp_path: Path, changes: dict[str, object], words: str):
        with pytest.raises(ConfigError, match=f"line 2: .*{words}"):
            self.read(tmp_path, session(request(0, [1])), session() | changes)


@pytest.fixture(scope="module")
def agents() -> list[Turn]:
    """Turns of recorded sessions of agents."""
    return read_trace(SESSIONS)


def play(turns: list[Turn]) -> Outcome:
    """Run turns through a model that all of them fit."""
    return simulate(turns, MODELS["nemotron-h-8b"], Settings(64.0, 0.5))


class TestPlayed:
    """Excerpts, and whole sessions, in simulated time."""

    def test_a_parent_does_not_wait_for_its_sub_agent(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        submitted: list[tuple[float, int]] = []
        submit = Replay.submit
        monkeypatch.setattr(
            Replay, "submit", lambda self, place: (submitted.append((self.now, place)), submit(self, place))
        )
        agent = {"t": 2.0, "requests": [{**request(0, [9]), "out": 3000}, request(1, [9, 8], think_time=4)]}
        line = session(request(0, [1]), agent, request(9, [1, 2], think_time=3.0))
        play(read_trace(write(tmp_path / "a.jsonl", line)))
        start, begun, parent, nested = (time for time, _ in submitted)
        assert [place for _, place in submitted] == [0, 1, 3, 2]
        assert begun - start == pytest.approx(2.0, abs=0.05)
        assert parent - start == pytest.approx(3.0, abs=0.05)
        assert nested - start > 3000 * Machine().overhead + 4.0

    def test_excerpts_of_real_traces(self, agents: list[Turn]):
        mooncake = read_trace(MOONCAKE)
        assert describe(agents)["sub_agents"] == 12
        assert (describe(agents)["requests"], describe(agents)["sessions"]) == (800, 20)
        assert describe(mooncake)["requests"] == 200
        assert mooncake[-1].time > mooncake[0].time
        found = play(agents[:10])
        assert found.refused == 0
        assert found.skipped_share > 0.7
        assert play(mooncake[:20]).skipped_share > 0.02

    def test_no_block_of_a_session_is_hashed_twice(self, agents: list[Turn], monkeypatch: pytest.MonkeyPatch):
        """Each block is hashed once, however many prompts begin with it: a long prompt costs its uncached part."""
        hashed: list[int] = []
        hash_run = hash_chain._hashes_of_blocks

        def counted(parent, tokens, first, last, size):
            hashed.append(last - first)
            return hash_run(parent, tokens, first, last, size)

        monkeypatch.setattr(hash_chain, "_hashes_of_blocks", counted)
        turns = [turn for turn in agents if turn.session == 0][:12]
        play(turns)
        different = len({block for turn in turns for block in _blocks(turn, 64)})
        answers = sum(len(turn.answer) // 64 + 1 for turn in turns)
        assert sum(turn.prompt_length // 64 for turn in turns) > 5 * different
        assert different <= sum(hashed) <= different + answers


def _blocks(turn: Turn, size: int) -> list[tuple[int, ...]]:
    tokens = turn.tokens()
    return [tokens[i : i + size] for i in range(0, len(tokens) - size + 1, size)]
