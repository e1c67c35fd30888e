"""What peers are measured by: the loop that keeps requests in flight, and what is said of goals."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.peers.compare import Goal, goals
from benchmarks.peers.work import OWN, QUICK, TURNS, Size, chat, figures, serve, shared


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


def test_verdicts():
    assert Goal("a", 0.8, 0.8, True).verdict() == "met"
    assert Goal("a", 1.0, 0.8, True).verdict() == "missed by 25 %"
    assert Goal("a", 1.4, 1.3, False).verdict() == "met"
    assert Goal("a", 1.0, 1.5, False).verdict() == "missed by 50 %"


def test_goals_need_the_peer_that_they_are_beside():
    case = {"first_ttft": 1.0, "later_ttft": 1.0, "generated_per_second": 10.0}
    size = Size(prefixes=QUICK.prefixes)
    names = [f"shared {p}, {n} at once" for p in size.prefixes for n in (1, 8)] + ["unique, 8 at once"]
    result = dict.fromkeys(names, case) | {"chat": [{"ttft": 1.0}] * TURNS}
    assert list(goals({"ours": result}, size)) == []
    judged = list(goals({"ours": result, "vllm": result}, size))
    assert [goal.ratio for goal in judged] == [1.0] * (4 + TURNS)
