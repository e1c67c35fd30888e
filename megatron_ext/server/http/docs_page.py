"""OpenAPI description as an HTML page without scripts and without external resources."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from html import escape

from megatron_ext.server.http.description import Schema
from megatron_ext.server.http.status_page import STYLE

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
main { max-width: 60rem; margin: 0 auto; font-size: 15px; overflow-wrap: anywhere }
h1 { margin-bottom: 8px } h3 { font-size: 14px; margin: 16px 0 4px }
h2 { font: 600 15px ui-monospace, monospace; margin: 0 0 4px }
section { margin-top: 16px } nav ul { columns: 20rem; padding-left: 20px; margin: 8px 0 }
dl { margin: 0 } dt { margin-top: 8px } dd { margin: 0 0 0 20px }
code { font: 13px ui-monospace, monospace } dt code { font-weight: 600 }
"""


_BOUNDS = {
    **{"minimum": "at least {}", "maximum": "at most {}"},
    **{"minLength": "at least {} characters", "maxLength": "at most {} characters"},
    **{"minItems": "at least {} items", "maxItems": "at most {} items"},
}


def docs_page(schema: Schema) -> str:
    """Render an OpenAPI description as a page."""
    title = escape(f"{schema['info']['title']} {schema['info']['version']}")
    operations = [
        (f"{method.upper()} {path}", operation)
        for path, methods in schema["paths"].items()
        for method, operation in methods.items()
    ]
    objects = _objects(operations, schema)
    contents = "".join(f'<li><a href="#{_anchor(name)}">{escape(name)}</a>' for name, _ in (*operations, *objects))
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8>",
        "<meta name=viewport content='width=device-width, initial-scale=1'>",
        f"<title>{title}</title><style>{STYLE}{_STYLE}</style>",
        f"<main><h1>{title}</h1>",
        '<p>For programs: <a href="/openapi.json">/openapi.json</a>. <a href="/">Status</a>.</p>',
        f"<nav class=card aria-label=Contents><h2>Contents</h2><ul>{contents}</ul></nav>",
    ]
    for name, operation in operations:
        parts += _operation(name, operation, schema)
    for name, component in objects:
        text = component.get("description", "")
        parts += [_heading(name, text), *_fields("Fields", component, schema), "</section>"]
    return "\n".join(parts)


def _objects(operations: Sequence[tuple[str, Schema]], schema: Schema) -> list[tuple[str, Schema]]:
    """Return the objects that bodies consist of, in the order in which they are met."""
    found: dict[str, Schema] = {}
    waiting = [_resolved(_body(operation), schema) for _, operation in operations]
    while waiting:
        for part in waiting.pop(0).get("properties", {}).values():
            for name in _references(part):
                if name not in found:
                    found[name] = schema["components"]["schemas"][name]
                    waiting.append(found[name])
    return list(found.items())


def _references(part: Schema) -> Iterator[str]:
    if "$ref" in part:
        yield str(part["$ref"]).rpartition("/")[2]
    for one in (*part.get("anyOf", ()), *([part["items"]] if "items" in part else ())):
        yield from _references(one)


def _anchor(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-").lower() or "root"


def _text(text: str) -> str:
    """Return text as HTML; what is between backticks is code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def _heading(name: str, text: str, mark: str = "") -> str:
    return f'<section class=card id="{_anchor(name)}"><h2>{escape(name)}{mark}</h2><p>{_text(text)}</p>'


def _body(operation: Schema) -> Schema:
    content = operation.get("requestBody", {}).get("content", {})
    body: Schema = content.get("application/json", {}).get("schema", {})
    return body


def _operation(name: str, operation: Schema, schema: Schema) -> Iterator[str]:
    mark = " <span class=faint>needs a key</span>" if operation.get("security") else ""
    yield _heading(name, operation.get("description", ""), mark)
    parameters = {one["name"]: one["schema"] for one in operation.get("parameters", ())}
    required = [one["name"] for one in operation.get("parameters", ()) if one["required"]]
    yield from _fields("Parameters", {"properties": parameters, "required": required}, schema)
    yield from _fields("Body", _resolved(_body(operation), schema), schema)
    answers = ((status, one["description"]) for status, one in sorted(operation["responses"].items()))
    yield from _list("Answers", [(status, "", _text(text)) for status, text in answers])
    yield "</section>"


def _list(title: str, rows: Sequence[tuple[str, str, str]]) -> Iterator[str]:
    """Yield a list of names, each with a kind (text) and an explanation (markup)."""
    if rows:
        items = "".join(
            f"<dt><code>{escape(name)}</code> <span class=faint>{escape(kind)}</span><dd>{text}"
            for name, kind, text in rows
        )
        yield f"<h3>{title}</h3><dl>{items}</dl>"


def _fields(title: str, named: Schema, schema: Schema) -> Iterator[str]:
    required = named.get("required", ())
    rows = []
    for name, one in named.get("properties", {}).items():
        kind = _kind(one, schema) + (", required" if name in required else "")
        values = [("Default", one["default"])] if "default" in one else []
        values += [("Example", example) for example in one.get("examples", ())]
        texts = [f"{word}: <code>{escape(json.dumps(value))}</code>." for word, value in values]
        described = f"{_text(one['description'])}." if "description" in one else ""
        rows.append((name, kind, " ".join([described, *texts])))
    yield from _list(title, rows)


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
    kind = str(field.get("type", field.get("const", "anything")))
    if kind == "array":
        kind = f"list of {_kind(field.get('items', {}), schema)}"
    limits = [words.format(field[name]) for name, words in _BOUNDS.items() if name in field]
    return ", ".join([kind, *limits])
