"""OpenAPI description of the server: FastAPI's routes and bodies, with the errors of middleware and limits.

FastAPI knows neither of these: it would document its own validation error, which this server never sends.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from megatron_ext.server.anthropic.error_envelope import COUNT_PATH, MESSAGES_PATH
from megatron_ext.server.http.auth import ADMIN_PATHS

Schema = dict[str, Any]


def _object(**properties: Schema) -> Schema:
    return {"type": "object", "required": list(properties), "properties": properties}


_TEXT, _MESSAGE, _MAYBE = {"type": "string"}, {"type": "string", "minLength": 1}, {"type": ["string", "null"]}
_ERROR = _object(error=_object(message=_MESSAGE, type=_TEXT, param=_MAYBE, code=_MAYBE))
_MESSAGES_ERROR = _object(
    type={"const": "error"}, error=_object(type=_TEXT, message=_MESSAGE), request_id=_TEXT
)  # of Anthropic's routes
_EVERYWHERE = {
    "400": "The request is not valid; the message says why",
    "403": "The key gives no access, or host or origin are not accepted",
    "500": "The engine or the server has failed",
    "503": "Shutting down, asleep, or out of memory or connections",
}
_WITH_KEY = {"401": "The key is missing or wrong"}
_WITH_BODY = {
    "408": "The request was not complete in time",
    "413": "The body is too long",
    "415": "The Content-Type of the body is not JSON",
}
_NAMES = {"404": "The model, the response or the request does not exist"}
_GENERATES = {"429": "The queue is full; see Retry-After"}
_FOREIGN = ("HTTPValidationError", "ValidationError")  # FastAPI's schemas of errors that are never sent here


def install_description(app: FastAPI, *, open_paths: frozenset[str], has_keys: bool) -> None:
    """Replace the OpenAPI description of an application.

    Args:
        app: Application with all its routes.
        open_paths: Paths that need no key.
        has_keys: Whether the other paths need one.
    """

    def describe() -> Schema:
        if app.openapi_schema is None:
            app.openapi_schema = _described(app, open_paths, has_keys=has_keys)
        return app.openapi_schema

    app.openapi = describe  # type: ignore[method-assign]  # FastAPI's way of extending it


def _described(app: FastAPI, open_paths: frozenset[str], *, has_keys: bool) -> Schema:
    schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
    components = schema.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    for name in _FOREIGN:
        schemas.pop(name, None)
    if has_keys:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    for path, operations in schema["paths"].items():
        for operation in operations.values():
            needs_key = has_keys and path not in open_paths
            if needs_key:
                operation["security"] = [{"key": []}]
            _complete(operation, path, _fields_of(operation, schemas), needs_key=needs_key)
    return schema


def _complete(operation: Schema, path: str, fields: Schema, *, needs_key: bool) -> None:
    """Add the error responses, and the media type of streamed ones."""
    responses = operation["responses"]
    responses.pop("422", None)
    errors = _EVERYWHERE | (_WITH_KEY if needs_key else {}) | (_WITH_BODY if "requestBody" in operation else {})
    if "model" in fields or "{" in path or path in ADMIN_PATHS:
        errors |= _NAMES
    if "stream" in fields:
        errors |= _GENERATES
        responses["200"]["content"]["text/event-stream"] = {"schema": _TEXT}
    schema = _MESSAGES_ERROR if path in (MESSAGES_PATH, COUNT_PATH) else _ERROR
    for status, text in errors.items():
        responses.setdefault(status, {"description": text, "content": {"application/json": {"schema": schema}}})


def _fields_of(operation: Schema, schemas: Schema) -> Schema:
    """Return the fields of the body, by name."""
    content = operation.get("requestBody", {}).get("content", {})
    reference = content.get("application/json", {}).get("schema", {}).get("$ref", "")
    found: Schema = schemas.get(reference.rpartition("/")[2], {})
    return found.get("properties", {})
