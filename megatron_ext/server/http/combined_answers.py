"""One response from the answers of several replicas."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.responses import JSONResponse


def combined(answers: Mapping[str, tuple[int, object]], *, needs_all: bool = True) -> JSONResponse:
    """Return all answers as `replicas`, by the name of the replica.

    Args:
        answers: Status and body of each replica.
        needs_all: Whether the status is the first that is not 200; otherwise one 200 is enough.
    """
    bad = [status for status, _ in answers.values() if status != 200]
    is_good = not bad or (not needs_all and len(bad) < len(answers))
    content = {"replicas": {name: body for name, (_, body) in answers.items()}}
    return JSONResponse(content, 200 if is_good else bad[0])
