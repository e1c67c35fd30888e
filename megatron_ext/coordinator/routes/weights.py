"""Route that gives all replicas of a group new weights."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from megatron_ext.coordinator.coordination import Coordination, CoordinationDependency
from megatron_ext.coordinator.membership.member import Status
from megatron_ext.coordinator.membership.versions import Stage
from megatron_ext.coordinator.routes.generation import passed_on
from megatron_ext.coordinator.routes.proxy import headers_of
from megatron_ext.coordinator.weights.fleet_update import FleetUpdate
from megatron_ext.coordinator.weights.replica_update import PATH
from megatron_ext.coordinator.weights.rollout import Rollout
from megatron_ext.coordinator.weights.updates import Refused
from megatron_ext.server.http.body import check_content_type, parse_json, read_body
from megatron_ext.server.openai.streaming import while_connected

router = APIRouter()


@router.post(PATH)
async def update_weights_from_disk(request: Request, coordination: CoordinationDependency) -> Response:
    """Write the weights of a checkpoint into all replicas of a group, at once or one after the other."""
    body = await read_body(request, coordination.settings.limits.body_bytes)
    check_content_type(request.headers.get("content-type"))
    update = FleetUpdate.of(parse_json(body))
    try:
        rollout = await while_connected(request.receive, coordination.updates.run(update, headers_of(request)))
    except Refused as error:
        return passed_on(error.answer)
    return _report(rollout, coordination)


def _report(rollout: Rollout, coordination: Coordination) -> Response:
    """Return what each replica said and which replicas are out. 200 if all replicas that were asked are updated."""
    plan, bad = rollout.plan, [one for one in rollout.replicas if one.stage is Stage.FAILED]
    out = _out(plan.identity.model, coordination)
    refusal = bad[0].answer if bad and len({one.status for one in bad}) == 1 else None
    if refusal is not None and refusal.status == bad[0].status and rollout.version is None and not out:
        return passed_on(refusal)
    updated = sum(one.stage is Stage.UPDATED for one in rollout.replicas)
    content = {
        "success": not bad,
        "message": f"{updated} of {len(rollout.replicas)} replicas have the weights of {plan.update.model_path}",
        "weights_version": plan.number,
        "replicas": {one.member.url: {"stage": one.stage.value, "answer": one.content} for one in rollout.replicas},
        "out": out,
    }
    return JSONResponse(content, bad[0].status if bad else 200)


def _out(group: str, coordination: Coordination) -> dict[str, str]:
    """Return why replicas of a group take no requests, by their URLs."""
    found = {}
    for row in coordination.rows():
        is_of_group = row["model"] in (group, None)
        if is_of_group and row["status"] not in (Status.READY.value, Status.PAUSED.value):
            found[str(row["url"])] = f"{row['status']}: {row['problem']}".removesuffix(": ")
    return found
