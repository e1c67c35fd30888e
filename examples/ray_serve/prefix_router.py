"""The package's routing policy as a request router of Ray Serve (its API for those is alpha; Ray 2.60).

It runs beside the deployment's handle. Prompts are text there, so a character's byte stands for a token and prefixes
are matched in blocks of bytes; what a replica holds is guessed from what it was given, as far as its memory reaches.
"""

from __future__ import annotations

import json

from ray.serve.request_router import PendingRequest, ReplicaID, ReplicaResult, RequestRouter, RunningReplica

from megatron_ext.config.routing import RoutingConfig
from megatron_ext.coordinator.approximate_prefix_index import ApproximatePrefixIndex
from megatron_ext.coordinator.routed_request import RoutedPrompt
from megatron_ext.routing.router import Router

BLOCK = 64  # bytes
ANSWER = 64  # tokens that are expected, where a request does not say


def text_of(body: bytes) -> bytes:
    """Return the prompt of a request body as bytes, in the order in which the model reads it."""
    try:
        content = json.loads(body)
    except ValueError:
        return b""
    if not isinstance(content, dict):
        return b""
    return json.dumps(content.get("messages", content.get("prompt")), ensure_ascii=False).encode()


class PrefixRouter(RequestRouter):
    """Sends a request to the replica that has most of its prompt, unless too much is to be computed there before."""

    def initialize_state(self, alpha: float = 0.5, blocks: int = 4096) -> None:
        """Ray calls it with `request_router_kwargs`.

        Args:
            alpha: As `--inference-dynamic-batching-prefix-caching-routing-alpha`.
            blocks: Of `BLOCK` bytes, that a replica is taken to hold.
        """
        self._router = Router(RoutingConfig(alpha=alpha))
        self._blocks = blocks
        self._memory: dict[str, ApproximatePrefixIndex] = {}
        self._flying: set[str] = set()

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Replicas have come or gone."""
        super().update_replicas(replicas)
        names = {one.replica_id.to_full_id_str() for one in replicas}
        for gone in set(self._memory) - names:
            del self._memory[gone]
            self._flying.difference_update(map(str, self._router.leave(gone)))
        for name in names - set(self._memory):
            self._router.join(name, BLOCK)
            self._memory[name] = ApproximatePrefixIndex(self._router, name, BLOCK, self._blocks, has_states=False)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The one that the policy chooses, and then all others, should it be full."""
        prompt = None if pending_request is None else self._prompt(pending_request)
        by_name = {one.replica_id.to_full_id_str(): one for one in candidate_replicas}
        others = [name for name in self._memory if name not in by_name]
        decision = None if prompt is None else self._router.route(prompt.prompt, others)
        if decision is None:
            return [list(candidate_replicas)]
        rest = [one for name, one in by_name.items() if name != decision.replica]
        return [[by_name[decision.replica]], rest]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult) -> None:
        """Count a request as in flight, and its prompt as cached by the replica from now on."""
        name, prompt = replica_id.to_full_id_str(), self._prompt(pending_request)
        if prompt is None or name not in self._memory:
            return
        others = [one for one in self._memory if one != name]
        decision, request = self._router.route(prompt.prompt, others), pending_request.metadata.internal_request_id
        if decision is not None and request not in self._flying:
            self._router.began(request, decision, prompt.prompt, ANSWER)
            self._flying.add(request)
        self._memory[name].answered(prompt)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Stop counting a request as in flight, however it ended."""
        if internal_request_id in self._flying:
            self._flying.discard(internal_request_id)
            self._router.ended(internal_request_id)

    def _prompt(self, pending: PendingRequest) -> RoutedPrompt | None:
        """Return the prompt of a call `ask(path, body)`; None if it has none."""
        text = text_of(pending.args[1]) if len(pending.args) > 1 else b""
        return RoutedPrompt.of(list(text), None) if text else None
