"""Body of `POST /update_weights_from_disk` at a coordinator: that of a replica's route, and fields of the fleet."""

from __future__ import annotations

import json
from typing import Annotated, Literal

from fastapi.exceptions import RequestValidationError
from pydantic import ConfigDict, Field, ValidationError

from megatron_ext.config.in_flight import MAX_VERSION
from megatron_ext.coordinator.weights.gate import USUAL_WAIT
from megatron_ext.server.openai.request_fields import Body, Text

LONGEST_PATH = 4096  # characters
USUAL_SECONDS, MAX_SECONDS = 600.0, 86_400.0

_Seconds = Annotated[float, Field(gt=0, le=MAX_SECONDS)]
_OURS = frozenset(("rollout", "model", "drain_seconds", "update_seconds", "max_wait_seconds"))


class FleetUpdate(Body):
    """New weights of a group of replicas. Fields that are not named here are passed on to each replica.

    Attributes:
        model_path: Directory of the weights, below the `--weights-root` of each replica.
        in_flight: What becomes of requests in flight; at a replica only `finish` keeps versions apart.
        weights_version: Number of the new weights; by default one more than the highest.
        rollout: `barrier`: all replicas at once, and new requests wait; `rolling`: one after the other.
        model: Group of replicas; needed if there are several.
        drain_seconds: Seconds for requests in flight to end, if they finish.
        update_seconds: Seconds for the answer of each replica.
        max_wait_seconds: Longest wait of a new request.
    """

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, protected_namespaces=())

    model_path: Annotated[Text, Field(min_length=1, max_length=LONGEST_PATH)]
    in_flight: Literal["recompute", "finish", "abort", "continue"] = "finish"
    weights_version: Annotated[int, Field(ge=0, le=MAX_VERSION)] | None = None
    rollout: Literal["barrier", "rolling"] = "barrier"
    model: Text | None = None
    drain_seconds: _Seconds = USUAL_SECONDS
    update_seconds: _Seconds = USUAL_SECONDS
    max_wait_seconds: _Seconds = USUAL_WAIT

    @classmethod
    def of(cls, content: object) -> FleetUpdate:
        """Validate a parsed body.

        Raises:
            RequestValidationError: A field is wrong.
        """
        try:
            return cls.model_validate(content)
        except ValidationError as error:
            errors = [{**one, "loc": ("body", *one["loc"])} for one in error.errors()]
            raise RequestValidationError(errors) from None

    def for_replicas(self, number: int) -> bytes:
        """Return the body for a replica, with the number of the new weights."""
        return json.dumps(self.model_dump(exclude=set(_OURS)) | {"weights_version": number}).encode()
