"""Start of new conversations: warming replicas get their share."""

from __future__ import annotations

from megatron_ext.config.routing import RoutingConfig
from megatron_ext.routing.prompt import Prompt
from megatron_ext.routing.router import Decision, Router

SIZE, SYSTEM, TURN = 4, 16, 32
BLOCKS = 400  # of other conversations, on each replica that is not new
ANSWER = 80  # tokens that each of these has yet to generate


def fleet(count: int = 4) -> Router:
    """Replicas with the same system prompt and much else, each of which generates an answer."""
    router = Router(RoutingConfig())
    for i in range(count):
        join(router, str(i))
    for i in range(count):
        fill(router, str(i), [*range(SYSTEM)])
        fill(router, str(i), [10**6 + j for j in range(SIZE * BLOCKS)])
        prompt = Prompt([2])
        router.began(("answer", i), Decision(str(i), 0), prompt, ANSWER)
        router.prefilled(("answer", i))
    return router


def has_grown(router: Router, name: str) -> bool:
    """A replica holds half of what replicas hold on average."""
    held = {one.name: one.held for one in router.members.values()}
    return 2 * held[name] >= sum(held.values()) / len(held)


def join(router: Router, name: str) -> None:
    router.join(name, SIZE)


def fill(router: Router, name: str, tokens: list[int]) -> None:
    hashes = [hash((name, tuple(tokens[:end]))) for end in range(SIZE, len(tokens) + 1, SIZE)]
    router.members[name].stored(hashes, None, tokens[: len(hashes) * SIZE])


def conversation(number: int) -> list[int]:
    """First turn of a conversation with the common system prompt, which is less than half of it."""
    return [*range(SYSTEM), *(1000 * (number + 1) + i for i in range(TURN))]


def served(router: Router, number: int) -> str:
    """Replica that serves a conversation's first turn, before the next one comes, and caches it."""
    prompt = Prompt(conversation(number))
    decision = router.route(prompt)
    router.began(number, decision, prompt)
    router.ended(number)
    fill(router, decision.replica, conversation(number))
    router.check()
    return decision.replica


def test_a_warming_replica_takes_its_share_until_its_cache_has_grown():
    """RP-2: of five replicas it computes about a fifth, though it is the only one without load; then it takes more."""
    router = fleet()
    join(router, "new")
    replicas = []
    while not has_grown(router, "new"):
        replicas.append(served(router, len(replicas)))
    assert len(replicas) > 10
    for end in range(1, len(replicas)):
        assert replicas[:end].count("new") <= 1 + end / 5
    served(router, len(replicas))  # the next request shows that it has grown
    assert {served(router, len(replicas) + i) for i in range(1, 6)} == {"new"}


def test_a_warming_replica_that_has_had_its_share_takes_what_others_would_queue():
    """RP-2: its share is no limit where the others have more to compute than a conversation is worth."""
    router = fleet(count=1)
    join(router, "new")
    assert [served(router, i) for i in range(2)] == ["new", "0"]
    prompt = Prompt([10**7 + i for i in range(3 * (SYSTEM + TURN))])
    router.began("long", Decision("0", 0), prompt)
    router.began("longer", Decision("new", 0), Prompt([3] * 400))
    router.prefilled("longer")
    assert router._sated, "it has had more than its share"
    assert served(router, 2) == "new"
