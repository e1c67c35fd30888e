"""Autoscaling policy of Ray Serve, with contexts as Ray's controller makes them; Ray itself is not needed."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_ext.ray_serve.autoscaling import ReplicaLoad, WaitingTokensPolicy, replica_loads

TOKENS, PATIENCE = 1000.0, 60.0


@dataclass
class Point:
    value: float


@dataclass
class Context:
    """Context of a deployment whose replicas 0, 1, ... started in this order."""

    target_num_replicas: int
    waiting: list[float]
    spared: list[float]
    running_replicas: list[int] = field(default_factory=list)
    current_time: float = 100.0
    policy_state: dict[str, object] = field(default_factory=dict)
    aggregated_metrics: dict[str, dict[int, float]] = field(default_factory=dict)
    raw_metrics: dict[str, dict[int, list[Point]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.running_replicas = self.running_replicas or list(range(len(self.waiting)))
        for i, (waiting, spared) in enumerate(zip(self.waiting, self.spared, strict=True)):
            values = {"waiting_tokens": waiting, "requests": 0, "capacity": 8, "started": float(i), "node": 1.0}
            for name, value in values.items():
                self.raw_metrics.setdefault(name, {})[i] = [Point(-1.0), Point(value)]
                self.aggregated_metrics.setdefault(name, {})[i] = value
            self.raw_metrics.setdefault("spared_tokens", {})[i] = [Point(5000.0), Point(5000.0 + spared)]


def test_more_replicas_for_waiting_tokens():
    """RP-6: at once, as many as the tokens need; while they start, no other number."""
    policy = WaitingTokensPolicy(TOKENS, PATIENCE)
    assert policy(Context(2, [2500, 0], [0, 0]))[0] == 3
    assert policy(Context(3, [2500, 0], [0, 0]))[0] == 3
    assert policy(Context(3, [0, 0], [0, 0]))[0] == 3, "the third one has not reported"
    assert policy(Context(2, [], []))[0] == 2, "no replica has"


def test_a_fleet_shrinks_when_the_replica_that_leaves_is_worth_least():
    """RP-6: Ray stops the newest one; its cache may keep it for a while, but not for ever."""
    policy = WaitingTokensPolicy(TOKENS, PATIENCE)
    assert policy(Context(3, [0, 0, 0], [500, 400, 100]))[0] == 2
    number, state = policy(Context(3, [0, 0, 0], [100, 400, 500]))
    assert number == 3
    assert policy(Context(3, [0, 0, 0], [100, 400, 500], current_time=159.0, policy_state=state)) == (3, state)
    assert policy(Context(3, [0, 0, 0], [100, 400, 500], current_time=160.0, policy_state=state))[0] == 2


def test_the_wait_begins_again_after_a_load():
    """RP-6: only an uninterrupted wish for fewer replicas counts."""
    policy = WaitingTokensPolicy(TOKENS, PATIENCE)
    _, state = policy(Context(3, [0, 0, 0], [100, 400, 500]))
    _, state = policy(Context(3, [2500, 0, 0], [100, 400, 500], current_time=130.0, policy_state=state))
    number, _ = policy(Context(3, [0, 0, 0], [100, 400, 500], current_time=170.0, policy_state=state))
    assert number == 3


def test_loads_are_read_from_reports():
    """RP-6: averages of loads, the last of what does not change, and what was spared between the first and the last."""
    context = Context(2, [10, 20], [30, 40])
    del context.raw_metrics["node"][1]
    assert replica_loads(context) == [ReplicaLoad("0", 10, 0, 8, 30, 0.0, "1")]
