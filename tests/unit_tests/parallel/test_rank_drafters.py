"""SP-13: who computes drafts of several ranks, and that all of them learn and forget the same."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatron_ext.errors import RankError
from megatron_ext.parallel import rank_drafters
from megatron_ext.parallel.commands import Call
from megatron_ext.parallel.rank_drafters import LeadingDrafter, RankDrafter
from megatron_ext.speculation.drafter import DraftRequest

TEXTS = {7: [1, 2, 3], 9: [4, 5], 11: [6]}


class Layer:
    """Drafter that repeats the last token, once less than it may, and writes down what it is told."""

    def __init__(self) -> None:
        self.told: list[object] = []

    def propose(self, asks):
        self.told.append(tuple((ask.request_id, len(ask.tokens), ask.limit) for ask in asks))
        return {ask.request_id: (ask.tokens[-1],) * (ask.limit - 1) for ask in asks}

    def forget(self, request_id):
        self.told.append(request_id)

    def reset(self):
        self.told.append("all")


@pytest.fixture
def sent(monkeypatch) -> list[torch.Tensor]:
    """Rows that were broadcast; the first call is the source's."""
    rows: list[torch.Tensor] = []

    def broadcast(row: torch.Tensor, source: int, group: object) -> None:
        rows.append(row.clone())
        row.copy_(rows[0])

    monkeypatch.setattr(rank_drafters, "broadcast", broadcast)
    return rows


def test_every_rank_learns_the_drafts_of_the_source(sent):
    """SP-13: of as many requests as were asked for, with fewer drafts than they may have, or none."""
    pair, layer = SimpleNamespace(size=lambda: 2), Layer()
    source, first = RankDrafter(pair, 1, 1, layer), RankDrafter(pair, 0, 1, None)
    limits = ((7, 3), (9, 2), (11, 1))
    expected = {7: (3, 3), 9: (5,), 11: ()}
    assert source.propose(limits, TEXTS.__getitem__) == expected
    assert first.propose(limits, TEXTS.__getitem__) == expected
    assert layer.told == [((7, 3, 3), (9, 2, 2), (11, 1, 1))]
    assert sent[0].shape == sent[1].shape


class Ranks:
    """Driver that writes down commands."""

    def __init__(self) -> None:
        self.told: list[object] = []

    def replica_of(self, request_id: int) -> int:
        return int(request_id == 9)

    def draft(self, replica: int, limits: tuple[tuple[int, int], ...]) -> None:
        self.told.append((replica, limits))

    def note(self, command: object) -> None:
        self.told.append(command)

    def step_error(self, error: Exception) -> Exception:
        self.told.append("over")
        return RankError(str(error))


def leading() -> tuple[LeadingDrafter, Ranks, Layer]:
    alone, layer = SimpleNamespace(size=lambda: 1), Layer()
    drafter = LeadingDrafter([RankDrafter(alone, 0, 0, None), RankDrafter(alone, 0, 0, layer)], layer)
    drafter.driver = Ranks()
    return drafter, drafter.driver, layer


def test_the_request_s_replica_drafts():
    """SP-13: by a command to its ranks; requests are forgotten on all ranks before the next step."""
    drafter, ranks, layer = leading()
    assert drafter.propose([]) == {}
    assert drafter.propose([DraftRequest(9, TEXTS[9], 2)]) == {9: (5,)}
    drafter.forget(9)
    drafter.reset()
    assert ranks.told == [(1, ((9, 2),)), *(Call("forget_drafts", (name,)) for name in (9, None))]
    assert layer.told == [((9, 2, 2),), 9, "all"]


def test_a_failure_ends_the_world(monkeypatch):
    """SP-13, MR-4: the other ranks may wait in the middle of a computation, so no step follows."""
    drafter, ranks, layer = leading()
    monkeypatch.setattr(layer, "propose", lambda asks: 1 // 0)
    with pytest.raises(RankError, match="division"):
        drafter.propose([DraftRequest(9, TEXTS[9], 2)])
    assert ranks.told[-1] == "over"
