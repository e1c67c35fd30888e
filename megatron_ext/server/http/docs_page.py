"""OpenAPI description as an HTML page without scripts and without external resources."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from megatron_ext.server.http.description import Schema

DOCS_HEADERS = {
    "Content-Security-Policy": "; ".join(
        (
            "default-src 'none'",
            "style-src 'unsafe-inline'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    ),
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
h2 { font: 600 1rem ui-monospace, monospace; border-top: 1px solid #ccc; padding-top: 1rem; margin-top: 2rem }
table { border-collapse: collapse } td { border: 1px solid #ddd; padding: .15rem .6rem; vertical-align: top }
td:first-child { font-family: ui-monospace, monospace; white-space: nowrap }
@media (prefers-color-scheme: dark) { body { background: #111; color: #ddd } td { border-color: #444 } }
"""


def docs_page(schema: Schema) -> str:
    """Render an OpenAPI description as a page."""
    title = escape(f"{schema['info']['title']} {schema['info']['version']}")
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title><style>{_STYLE}</style>",
        f"<h1>{title}</h1>",
        '<p>For programs: <a href="/openapi.json">/openapi.json</a>. <a href="/">Status</a>.</p>',
    ]
    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            parts += _operation(method, path, operation, schema)
    return "\n".join(parts)


def _operation(method: str, path: str, operation: Schema, schema: Schema) -> Iterator[str]:
    key = " &#128274;" if operation.get("security") else ""
    yield f"<h2>{escape(method.upper())} {escape(path)}{key}</h2><p>{escape(operation.get('description', ''))}</p>"
    parameters = [(one["name"], f"in the {one['in']}") for one in operation.get("parameters", ())]
    yield from _table("Parameters", parameters)
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    yield from _table("Body", _fields(body, schema))
    yield from _table("Answers", [(status, one["description"]) for status, one in operation["responses"].items()])


def _table(title: str, rows: Sequence[tuple[str, str]]) -> Iterator[str]:
    if rows:
        cells = "".join(f"<tr><td>{escape(name)}<td>{escape(text)}" for name, text in rows)
        yield f"<p>{title}</p><table>{cells}</table>"


def _fields(body: Schema, schema: Schema) -> list[tuple[str, str]]:
    named = _resolved(body, schema)
    required = named.get("required", ())
    return [
        (name, _kind(one, schema) + (", required" if name in required else ""))
        for name, one in named.get("properties", {}).items()
    ]


def _resolved(part: Schema, schema: Schema) -> Schema:
    for choice in part.get("anyOf", ()):
        if "$ref" in choice:
            part = choice
    name = part.get("$ref", "").rpartition("/")[2]
    found: Schema = schema["components"]["schemas"].get(name, part)
    return found


def _kind(field: Schema, schema: Schema) -> str:
    """Return the type of a field in a few words."""
    if "anyOf" in field:
        kinds = [_kind(one, schema) for one in field["anyOf"] if one.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds))
    if "$ref" in field:
        return str(field["$ref"]).rpartition("/")[2]
    if field.get("type") == "array":
        return f"list of {_kind(field.get('items', {}), schema)}"
    bounds = {"minimum": "at least", "maximum": "at most", "minLength": "at least", "maxLength": "at most"}
    limits = [f"{words} {field[name]}" for name, words in bounds.items() if name in field]
    return ", ".join([str(field.get("type", field.get("const", "anything"))), *limits])
