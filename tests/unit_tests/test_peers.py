"""Speed measurements: the loop that keeps requests in flight, and the report on goals."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.goals import CHAT_TOKENS, Goal, goals
from benchmarks.peers.work import CHATS, OWN, TURNS, alone, chat, figures, serve, shared
from tests.unit_tests.support.simulated_engine import SimulatedEngine


class Counting:
    """A peer that gives each request in flight one token a step, and skips what it saw before."""

    def __init__(self) -> None:
        self.live: dict[int, tuple[list[int], int, int]] = {}
        self.most = 0

    def forget(self) -> None:
        pass

    def submit(self, key: int, prompt: list[int], count: int) -> None:
        self.live[key] = (prompt, count, 0)
        self.most = max(self.most, len(self.live))

    def step(self) -> Iterator[tuple[int, list[int], int, bool]]:
        for key, (prompt, count, made) in list(self.live.items()):
            self.live[key] = (prompt, count, made + 1)
            if made + 1 == count:
                del self.live[key]
            yield key, [made], 5, made + 1 == count


def test_so_many_are_in_flight():
    peer = Counting()
    records, seconds = serve(peer, shared(64, 6), 4, count=3)
    assert peer.most == 4
    assert [one.tokens for one in records] == [[0, 1, 2]] * 6
    assert all(0 <= one.first <= one.last <= seconds for one in records)
    made = figures(records, seconds)
    assert (made["skipped_tokens"], made["prompt_tokens"]) == (30, 6 * (64 + OWN))


def test_prompts_share_what_they_should():
    one, other = shared(64, 2)
    assert one[:64] == other[:64]
    assert one[64:] != other[64:]


def test_each_turn_begins_with_what_was_said():
    turns = chat(Counting(), 2)
    assert len(turns) == TURNS
    assert [turn["computed"] for turn in turns] == sorted(turn["computed"] for turn in turns)


def test_a_cold_start_is_tried_several_times():
    class Forgetful(Counting):
        forgotten = 0

        def forget(self) -> None:
            self.forgotten += 1

    peer = Forgetful()
    assert alone(peer, shared(64, 3), 3)["prompt_tokens"] == 3 * (64 + OWN)
    assert peer.forgotten == 2


def test_the_chat_computes_few_tokens():
    """HY-4, SC-3: at most 6,800 of 19,072 prompt tokens of eight conversations are computed (the speed issue)."""
    turns = chat(SimulatedEngine(), CHATS)
    computed = sum(turn["computed"] for turn in turns)
    assert 0 < computed <= CHAT_TOKENS


def test_a_chat_without_snapshots_computes_more():
    """Negative control."""
    assert sum(turn["computed"] for turn in chat(SimulatedEngine(slots=0), 2)) > CHAT_TOKENS / 4


def test_verdicts():
    assert Goal("a", 0.8, 0.8).verdict() == "met"
    assert Goal("a", 1.0, 0.8).verdict() == "missed by 25 %"
    assert Goal("a", 1.4, 1.3, is_upper_bound=False).verdict() == "met"
    assert Goal("a", 1.0, 1.5, is_upper_bound=False).verdict() == "missed by 50 %"
    assert Goal("a", None, 1.5).verdict() == "not measured"


CASE = {"first_ttft": 1.0, "later_ttft": 0.5, "generated_per_second": 10.0}
PEER = {f"shared {p}, {n} at once": CASE for p in (2048, 8192) for n in (1, 8)}
PEER |= {"unique, 8 at once": CASE, "chat": [{"ttft": 1.0, "computed": 1_700}] * TURNS}
OURS = PEER | {"floor": {"2048": {"cold": 0.5, "warm": 0.1}, "8192": {"cold": 0.8, "warm": 0.25}}}
OURS |= {"unique, cache on / off": 1.01}
RESULTS = {
    "ours": OURS,
    "vllm": PEER,
    "recurrent_kinds": {"Mamba-2": {"decode": 1.5}, "Mamba-1": {"decode": 1.3}},
    "decode_context": {"8192": 3.0, "128": 2.0, "2048": 9.0},
    "host_path": {"cold": 1.9, "cached": 1.7},
    "host_step": {"64 greedy": {"goal": 1.2}},
    "sampling": {words: {"neither": 1.0, "top_p 0.9": 9.0} for words in ("32000", "131072")},
    "speculation": {
        **{f"attention, {text}, {n}": {"ratio": 2.0 - n / 32} for text in ("editing", "new") for n in (1, 32)},
        "attention, extraction, 1": {"ratio": 1.7},
        "transformers, editing": {"plain": 1.0, "lookup": 0.5},
    },
}


def judged(results: dict) -> dict[str, Goal]:
    return {goal.name: goal for goal in goals(results, (2048, 8192))}


def test_every_goal_is_judged():
    """The rows of the issue of speed: 13 of workloads, 4 turns, 1 that must hold, kinds, context, host, drafts."""
    found = judged(RESULTS)
    assert len(found) == 2 * 5 + 1 + TURNS + 2 + 3 + 3 + 4 + 2
    assert all(goal.measured is not None for goal in found.values())
    verdicts = {name: goal.verdict() for name, goal in found.items()}
    assert verdicts["8,192 shared, 1 at once: cold ttft / floor"] == "met"
    drafts = [found[name].measured for name in found if "with drafts / without" in name]
    assert drafts == [1.7, 1.0]
    assert verdicts["2,048 shared, 1 at once: cold ttft / floor"] == "missed by 33 %"
    assert verdicts["2,048 shared, 1 at once: warm ttft / floor"] == "missed by 127 %"
    assert verdicts["8,192 shared, 1 at once: warm ttft / floor"] == "met"
    assert verdicts["2,048 shared, 8 at once: tokens/s / vLLM's"] == "missed by 30 %"
    assert verdicts["chat: prompt tokens computed (must hold)"] == "met"
    assert verdicts["decode step of 8 behind the longest context / the shortest"] == "met"
    assert verdicts["decode of 8 / transformers', Mamba-1"] == "missed by 8 %"


@pytest.mark.parametrize("missing", list(RESULTS))
def test_what_was_not_measured_is_listed(missing: str):
    """Figures of a missing peer or of a failed part are listed, not silently dropped."""
    found = judged({name: figures for name, figures in RESULTS.items() if name != missing})
    lost = [goal for goal in found.values() if goal.measured is None]
    assert lost
    assert all(goal.verdict() == "not measured" for goal in lost)
    assert len(found) >= len(judged(RESULTS)) - 1  # kinds that were not measured have no names
