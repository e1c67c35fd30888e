"""The router's rules on recorded traces (RP-7): what a fleet skips, and how long its requests queue."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.cases import Run, case
from benchmarks.routing.balancers import Balancer, Ours
from benchmarks.routing.fleet import figures
from benchmarks.routing.replica import PREFILL, Request
from benchmarks.routing.traffic import UNIT_TOKENS, Session
from benchmarks.routing.world import Scale, World
from megatron_ext.simulation.formats import read_trace
from megatron_ext.simulation.trace import Turn

# Policies and alphas: Megatron 0.19's default, its other rules, the default of Megatron's main branch, and ours.
RULES = (
    ("load_balanced", 0.5),
    ("longest_prefix", 0.5),
    ("longest_prefix", 1.0),
    ("least_computed", 1.0),
    ("least_computed", 0.5),
)


@case("routing", quick=None)
def recorded(
    run: Run, trace: str = "", replicas: int = 8, requests: int = 3_000, offered: float = 2.0, capacity: int = 32_000
) -> None:
    """Fleets on a recorded trace, by rule. `offered`: prompt tokens over the rate without a cache."""
    if not trace:
        run.remark("no trace is given: trace=FILE names one of JSON lines (docs/policies.md)")
        return
    turns = read_trace(Path(trace), requests)
    scale = Scale(replicas, len(turns), capacity, offered, failures=0.0)
    for policy, alpha in RULES:
        balancer = Ours(replicas, alpha, policy)
        run.row(f"{policy}, alpha {alpha:g}", figures(RecordedWorld(scale, balancer, turns).run(), balancer))


@dataclass
class RecordedSession(Session):
    """Session of recorded turns.

    Attributes:
        recorded: Its turns in order.
    """

    recorded: list[Turn] = field(default_factory=list)


class RecordedWorld(World):
    """Simulation run of the turns of a trace; starts of sessions are compressed to the offered load.

    Args:
        scale: Size of the fleet.
        balancer: Balancer of the fleet.
        turns: Turns of the trace.
    """

    def __init__(self, scale: Scale, balancer: Balancer, turns: Sequence[Turn]) -> None:
        self._turns = turns
        super().__init__(scale, balancer)

    def sessions(self, rate: float) -> Iterator[RecordedSession]:
        """Yield the sessions by start. A sub-agent starts with the session of the turn beside it."""
        found: dict[int, RecordedSession] = {}
        starts: dict[int, float] = {}
        for turn in self._turns:
            if turn.session not in found:
                start = turn.time + (starts[turn.beside.session] if turn.beside is not None else 0.0)
                starts[turn.session] = start
                found[turn.session] = RecordedSession(start, turn.salt or "", array("I"), [])
            found[turn.session].recorded.append(turn)
        prefill = self.scale.offered * self.scale.replicas * PREFILL * UNIT_TOKENS
        last = sum(turn.prompt_length for turn in self._turns) / prefill
        factor = last / max(starts.values())
        for session in found.values():
            session.start *= factor
            # After each turn come the seconds until the next one.
            gaps = [turn.time if turn.is_reply else 0.0 for turn in session.recorded[1:]]
            session.turns = [(0, 1, gap) for gap in (*gaps, 0.0)]
        return iter(sorted(found.values(), key=lambda session: session.start))

    def _ask(self, session: RecordedSession, turn: int) -> None:
        asked = session.recorded[turn]
        self._send(Request(session, turn, self._now, _units(asked.prompt), (), _units([asked.answer]), ()))


def _units(pieces: Sequence[Sequence[int]]) -> array[int]:
    """Return one id for each 64 tokens: equal beginnings have equal ids."""
    units, before = array("I"), 0
    for piece in pieces:
        units.extend(piece[-before % UNIT_TOKENS :: UNIT_TOKENS])
        before += len(piece)
    return units
