"""RP-2: choices of Megatron's routing policies equal those of upstream's own coordinator, driven without sockets."""

from __future__ import annotations

import faulthandler
import random
import signal
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest

from megatron_ext.config.routing import RoutingConfig
from megatron_ext.mcore import versions
from megatron_ext.routing.prompt import Prompt
from megatron_ext.routing.router import Router

SIZE, SLOTS, CLIENT = 4, 8, b"client"


class Upstream:
    """Upstream's coordinator after its start, with ranks that have connected; `sent` has the rank of each request."""

    def __init__(self, policy: str, alpha: float, ranks: int) -> None:
        from megatron.core.inference import data_parallel_inference_coordinator as package
        from megatron.core.inference.config import PrefixCachingCoordinatorPolicy
        from megatron.core.inference.headers import Headers

        for number in (signal.SIGTERM, signal.SIGINT):  # which its module registers
            faulthandler.unregister(number)
        self._headers, self._handlers = Headers, package.HANDLERS
        self.sent: list[int] = []
        names = [bytes([rank]) for rank in range(ranks)]
        one = self._coordinator = package.DataParallelInferenceCoordinator.__new__(
            package.DataParallelInferenceCoordinator
        )
        one.router_socket = SimpleNamespace(send_multipart=self._send)
        one.identities_of_data_parallel_ranks, one._identities_list = deque(names), names
        one.identity_to_rank_index = {name: rank for rank, name in enumerate(names)}
        one._pending_counts = np.zeros(ranks, dtype=np.int32)
        one._hash_table, one._hash_assignment_counter = {}, 0
        one.request_id_to_client_id, one.request_id_to_client_request_id, one.request_id_to_rank = {}, {}, {}
        one.client_request_to_request_id = {}
        one.next_request_id, one.known_clients, one.schedule_records = 0, {CLIENT}, None
        one.block_size_tokens, one.enable_prefix_caching, one.max_requests = SIZE, True, SLOTS
        one.prefix_caching_coordinator_policy = PrefixCachingCoordinatorPolicy(policy)
        one.prefix_caching_routing_alpha = alpha
        one.detokenize = lambda request: None

    def _send(self, message: list[bytes]) -> None:
        if message[0] != CLIENT:
            self.sent.append(message[0][0])

    def submit(self, request: int, tokens: list[int]) -> int:
        """Submit a request; return the rank that got it."""
        header = self._headers.SUBMIT_REQUEST
        self._handlers[header](self._coordinator, CLIENT, [header.value, request, tokens, {}])
        return self.sent[-1]

    def end(self, request: int, rank: int) -> None:
        """Let a rank reply that a request has ended."""
        header = self._headers.ENGINE_REPLY
        self._handlers[header](self._coordinator, bytes([rank]), [header.value, [{"request_id": request}]])


@pytest.mark.skipif(versions.VERSION < (0, 19), reason="this version's coordinator has no policies")
@pytest.mark.parametrize("policy", ["longest_prefix", "first_prefix_block", "load_balanced"])
def test_choices_equal_upstreams(policy: str):
    """RP-2: request by request over random histories, ties included."""
    for seed in range(20):
        chance = random.Random(seed)
        ranks, alpha = chance.randint(1, 5), chance.choice([0.0, 0.25, 0.5, 0.9, 1.0])
        upstream, router = Upstream(policy, alpha, ranks), Router(RoutingConfig(policy, alpha))
        for rank in range(ranks):
            router.join(str(rank), SIZE, slots=SLOTS)
        running: dict[int, int] = {}
        for request in range(80):
            for one in [one for one in running if chance.random() < 0.15]:
                upstream.end(one, running.pop(one))
                router.ended(one)
            tokens = [chance.randint(0, 1) for _ in range(chance.randint(1, 5)) for _ in range(SIZE)]
            tokens = tokens[: chance.randint(1, len(tokens))]
            prompt = Prompt(tokens)
            decision = router.route(prompt)
            rank = upstream.submit(request, tokens)
            assert int(decision.replica) == rank, (seed, request, tokens)
            router.began(request, decision, prompt)
            running[request] = rank
            ends = range(SIZE, len(tokens) + 1, SIZE)
            if ends:  # the replica caches every block, as upstream's table has it
                blocks = [hash((rank, *tokens[:end])) for end in ends]
                router.members[decision.replica].stored(blocks, None, tokens[: ends[-1]])
