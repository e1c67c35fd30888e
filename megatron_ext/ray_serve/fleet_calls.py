"""Calls of an ingress to all replicas of a deployment, by Ray Serve's broadcasts.

Tried with Ray 2.60.0. A broadcast's public result has one time limit for all replicas, and no names. So that a replica
that hangs costs its own answer only, this module uses one private name, `_fetch_replica_results_async`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from ray.exceptions import RayError
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from megatron_ext.ray_serve.fleet_routes import Answers, WholeAnswer
from megatron_ext.ray_serve.forwarded import ForwardedRequest

if TYPE_CHECKING:
    from ray.serve._private.replica_result import ReplicaResult

LONGEST_PROBLEM = 300  # characters


class FleetCalls:
    """Calls to all replicas.

    Args:
        replicas: Handle of the replicas, whose method `answer_whole` is called.
    """

    def __init__(self, replicas: DeploymentHandle) -> None:
        self._replicas = replicas
        self._names: dict[str, str] = {}  # of replicas that have answered, by the id of their actor

    async def ask_all(self, request: ForwardedRequest, patience: float) -> Answers:
        """Return the answer of each replica that runs, or the reason why it has not answered.

        Args:
            request: Request that all of them get.
            patience: Seconds that each of them has.
        """
        broadcast = self._replicas.broadcast("answer_whole", request)
        try:
            results: list[ReplicaResult] = await broadcast._fetch_replica_results_async()
        except DeploymentUnavailableError:
            return {}
        answers = dict(await asyncio.gather(*(self._answer(one, patience) for one in results)))
        self._names = {actor: name for actor, name in self._names.items() if name in answers}
        return answers

    async def _answer(self, result: ReplicaResult, patience: float) -> tuple[str, WholeAnswer | str]:
        actor = (await result.to_object_ref_async()).task_id().actor_id().hex()
        name = self._names.get(actor, f"actor {actor}")
        try:
            answer: WholeAnswer = await asyncio.wait_for(result.get_async(), patience)
        except asyncio.TimeoutError:
            result.cancel()
            return name, f"no answer within {patience:g} s"
        except RayError as error:
            return name, " ".join(str(error).split())[:LONGEST_PROBLEM]
        self._names[actor] = answer.replica
        return answer.replica, answer
