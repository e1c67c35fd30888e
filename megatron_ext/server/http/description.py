"""OpenAPI description of the server: FastAPI's routes and bodies, with the errors of middleware and limits.

FastAPI knows neither of these: it would document its own validation error, which this server never sends.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from megatron_ext.server.anthropic.error_envelope import COUNT_PATH, MESSAGES_PATH
from megatron_ext.server.http.auth import ADMIN_PATHS
from megatron_ext.server.http.field_descriptions import FIELDS, OF_SCHEMA, FieldText

Schema = dict[str, Any]

_ERROR = "Error"
_ERROR_SCHEMA: Schema = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string", "minLength": 1},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_MESSAGES_ERROR = "MessagesError"
_MESSAGES_ERROR_SCHEMA: Schema = {
    "type": "object",
    "required": ["type", "error", "request_id"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string", "minLength": 1}},
        },
        "request_id": {"type": "string"},
    },
}
_KEY = "key"
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
_NAMES = {"404": "The model does not exist"}
_STORED = {"404": "The response is not stored"}
_ADMIN = {"404": "No running request has that id"}
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
    schemas[_ERROR] = _ERROR_SCHEMA
    if MESSAGES_PATH in schema["paths"]:
        schemas[_MESSAGES_ERROR] = _MESSAGES_ERROR_SCHEMA
    if has_keys:
        components["securitySchemes"] = {_KEY: {"type": "http", "scheme": "bearer"}}
    for name, component in schemas.items():
        required = component.get("required", ())
        for field, part in component.get("properties", {}).items() if name != _ERROR else ():
            _describe(part, OF_SCHEMA.get((name, field)) or FIELDS.get(field), has_default=field not in required)
    for path, operations in schema["paths"].items():
        for operation in operations.values():
            for one in operation.get("parameters", ()):
                _describe(one["schema"], FIELDS.get(one["name"]), has_default=not one["required"])
            needs_key = has_keys and path not in open_paths
            if needs_key:
                operation["security"] = [{_KEY: []}]
            _complete(operation, path, schemas, needs_key=needs_key)
    return schema


def _describe(part: Schema, told: FieldText | None, *, has_default: bool) -> None:
    """Add what is known of a field to its schema, and write the bounds of integers as integers."""
    _whole_bounds(part)
    if told is not None:
        part |= {"description": told.description, "examples": [told.example]}
        if has_default:
            part["default"] = told.default


def _whole_bounds(part: Schema) -> None:
    if part.get("type") == "integer":
        part |= {name: int(part[name]) for name in ("minimum", "maximum") if name in part}
    for one in (*part.get("anyOf", ()), *([part["items"]] if "items" in part else ())):
        _whole_bounds(one)


def _complete(operation: Schema, path: str, schemas: Schema, *, needs_key: bool) -> None:
    """Add the error responses, and the media type of streamed ones."""
    responses = operation["responses"]
    responses.pop("422", None)
    fields = _fields_of(operation, schemas)
    errors = dict(_EVERYWHERE) | (_WITH_KEY if needs_key else {}) | (_WITH_BODY if "requestBody" in operation else {})
    if "model" in fields or "{model}" in path:
        errors |= _NAMES
    if "{response_id}" in path:
        errors |= _STORED
    if path in ADMIN_PATHS:
        errors |= _ADMIN
    if "stream" in fields:
        errors |= _GENERATES
        responses["200"]["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    error = _reference(_MESSAGES_ERROR if path in (MESSAGES_PATH, COUNT_PATH) else _ERROR)
    for status, text in errors.items():
        responses[status] = {"description": text, "content": {"application/json": {"schema": error}}}
    if path in ("/health", "/ping"):
        responses["503"]["content"]["application/json"] = {"schema": {"type": "object"}}


def _fields_of(operation: Schema, schemas: Schema) -> Schema:
    """Return the fields of the body, by name."""
    content = operation.get("requestBody", {}).get("content", {})
    reference = content.get("application/json", {}).get("schema", {}).get("$ref", "")
    found: Schema = schemas.get(reference.rpartition("/")[2], {})
    return found.get("properties", {})


def _reference(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}
