"""OpenAPI description of the server: the errors and streams of its routes, and which of them need a key."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

Schema = dict[str, Any]
Responses = dict[int | str, Schema]  # as FastAPI's routes take them


def _object(**properties: Schema) -> Schema:
    return {"type": "object", "required": list(properties), "properties": properties}


def _errors(schema: Schema) -> Responses:
    """Return the errors of a route, whose statuses share a form; without it FastAPI describes its own 422."""
    return {
        "default": {
            "description": "Error; the message says why",
            "content": {"application/json": {"schema": schema}},
        }
    }


_TEXT, _MESSAGE, _MAYBE = {"type": "string"}, {"type": "string", "minLength": 1}, {"type": ["string", "null"]}
ERRORS = _errors(_object(error=_object(message=_MESSAGE, type=_TEXT, param=_MAYBE, code=_MAYBE)))
MESSAGES_ERRORS = _errors(
    _object(type={"const": "error"}, error=_object(type=_TEXT, message=_MESSAGE), request_id=_TEXT)
)
STREAMS: Responses = {200: {"content": {"text/event-stream": {"schema": _TEXT}}}}


def install_description(app: FastAPI, *, open_paths: frozenset[str], has_keys: bool) -> None:
    """Describe the key of an application.

    Args:
        app: Application with all its routes.
        open_paths: Paths that need no key.
        has_keys: Whether the other paths need one.
    """
    build = app.openapi

    def describe() -> Schema:
        schema = build()  # FastAPI makes it once
        if has_keys:
            schema["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            for path in schema["paths"].keys() - open_paths:
                for operation in schema["paths"][path].values():
                    operation["security"] = [{"key": []}]
        return schema

    app.openapi = describe  # type: ignore[method-assign]  # FastAPI's way of extending it
