"""Reference pages made from the code: flags, routes, metrics, and the names of the Python package."""

from __future__ import annotations

import argparse
import ast
import inspect
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from tools.pages.json_fields import described
from tools.pages.markdown import plain, table

ROOT = Path(__file__).resolve().parents[2]
METRICS = "megatron_ext/server/monitoring/metrics.py"
FAMILIES = {
    "Counter": "counter",
    "CounterMetricFamily": "counter",
    "Histogram": "histogram",
    "_histogram": "histogram",
    "GaugeMetricFamily": "gauge",
    "_GAUGES": "gauge",
}


def flags() -> str:
    """Return the page of all flags, by command and group of `--help`."""
    from arguments.parser import build_parser, build_server_parser

    text = "# Flags\n\nLook up a flag, its values and its default. This page is made from the parsers.\n"
    known: set[str] = set()
    for command, parser in (("run", build_parser()), ("serve", build_server_parser())):
        text += f"\n## megatron-ext {command}\n"
        text += "" if command == "run" else "\nFlags of the command above are not repeated.\n"
        for title, actions in groups_of(parser):
            rows = [row for action in actions for row in flag_row(action, known)]
            if rows:
                text += f"\n### {command}: {title}\n\n" + table(["flag", "meaning"], rows)
    return text


def groups_of(parser: argparse.ArgumentParser) -> list[tuple[str | None, list[argparse.Action]]]:
    """Return the groups of a parser: title and arguments of each, as its help shows them."""
    found: list[tuple[str | None, list[argparse.Action]]] = []

    class Collecting(argparse.HelpFormatter):
        def start_section(self, heading: str | None) -> None:
            found.append((heading, []))
            super().start_section(heading)

        def add_arguments(self, actions: Iterable[argparse.Action]) -> None:
            listed = list(actions)
            found[-1][1].extend(listed)
            super().add_arguments(listed)

    parser.formatter_class = Collecting
    parser.format_help()
    return found


def flag_row(action: argparse.Action, known: set[str]) -> Iterator[list[str]]:
    """Yield the row of a flag with help, unless it is known already."""
    if action.help == argparse.SUPPRESS or not action.option_strings or action.option_strings[0] in known:
        return
    known.update(action.option_strings)
    values = action.metavar
    if not values and action.choices:
        values = "{" + ", ".join(map(str, action.choices)) + "}"
    shown = " ".join(values) if isinstance(values, tuple) else values or ""
    names = ", ".join(f"`{name}`" for name in action.option_strings)
    yield [f"{names} {plain(shown)}".strip(), plain((action.help or "").replace("%%", "%"))]


def routes() -> str:
    """Return the page of the server's routes."""
    from megatron_ext.server.http.auth import OPEN_PATHS

    schema = described()
    rows = []
    for path, methods in sorted(schema["paths"].items()):
        for method, operation in methods.items():
            body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
            fields = body_fields(body, schema.get("components", {}).get("schemas", {}))
            key = "no" if path in OPEN_PATHS else "yes"
            text = operation.get("description") or operation.get("summary", "")
            rows.append([f"`{method.upper()} {path}`", key, text.split("\n\n")[0], fields])
    return (
        "# Routes\n\nLook up a route of the server and the fields of its body. This page is made from the routes; "
        "`/docs` of a running server has types, defaults and examples, [the server](../server.md) what they mean. "
        "Keys are asked for where the server has some.\n\n"
        + table(["route", "key", "meaning", "fields of the body"], rows)
    )


def body_fields(schema: Mapping, known: Mapping) -> str:
    """Return the names of a body's fields, the required ones first and bold."""
    name = schema.get("$ref", "").rsplit("/", 1)[-1]
    found = known.get(name, schema)
    required = found.get("required", [])
    rest = [field for field in found.get("properties", {}) if field not in required]
    return ", ".join([*(f"**`{field}`**" for field in required), *(f"`{field}`" for field in rest)])


def metrics() -> str:
    """Return the page of the metrics."""
    text = (
        "# Metrics\n\nLook up a metric of `/metrics`. This page is made from the code; "
        "[the server](../server.md#metrics) has those that are named at run time, too.\n\n"
    )
    rows = [[f"`{name}`", kind, said] for name, kind, said in sorted(set(metric_rows(ROOT / METRICS)))]
    return text + table(["name", "type", "meaning"], rows)


def metric_rows(source: Path) -> Iterator[tuple[str, str, str]]:
    """Yield name, type and description of each metric that a module declares: in calls, and in its tables."""
    tree = ast.parse(source.read_text("utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and len(node.args) > 1:
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            yield from metric_row(FAMILIES.get(called), node.args)
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            table_name = getattr(node.targets[0], "id", "")
            kind = FAMILIES.get(table_name, "counter" if table_name.endswith("COUNTERS") else None)
            for row in node.value.elts:
                if isinstance(row, ast.Tuple) and len(row.elts) > 2:
                    yield from metric_row(kind, row.elts)


def metric_row(kind: str | None, words: list[ast.expr]) -> Iterator[tuple[str, str, str]]:
    """Yield a metric, if the first two of the words are a name and a description."""
    name, said = (literal(word) for word in words[:2])
    if kind is not None and name.strip("_") and said[:1].isalpha():
        full = f"megatron_ext_{name.removeprefix('_')}"
        yield full + ("_total" if kind == "counter" and not full.endswith("_total") else ""), kind, said


def literal(word: ast.expr) -> str:
    """Return the constant text of an expression, without what an f-string puts in, or an empty text."""
    if isinstance(word, ast.JoinedStr):
        return "".join(str(part.value) for part in word.values if isinstance(part, ast.Constant))
    return word.value if isinstance(word, ast.Constant) and isinstance(word.value, str) else ""


def python() -> str:
    """Return the page of the public Python names, with their signatures and docstrings."""
    import megatron_ext

    text = (
        "# Python names\n\nLook up a name of `import megatron_ext`. This page is made from the docstrings; "
        "[the engine in Python](../python.md) shows how they are used.\n"
    )
    for name in sorted(set(megatron_ext.__all__) - {"__version__"}):
        found = getattr(megatron_ext, name)
        text += f"\n## {name}\n\n```python\n{signature(name, found)}\n```\n\n{documented(found)}\n"
        if inspect.isclass(found):
            for method, function in inspect.getmembers(found, inspect.isfunction):
                if not method.startswith("_") and function.__doc__ and method in vars(found):
                    text += f"\n### {name}.{method}\n\n```python\n{signature(method, function)}\n```\n\n"
                    text += f"{documented(function)}\n"
    return text


def signature(name: str, found: object) -> str:
    """Return a name with its parameters; of a class that cannot be called by users its name alone."""
    try:
        shown = inspect.signature(found)
    except (TypeError, ValueError):
        return name
    parts = [str(parameter) for parameter in shown.parameters.values()]
    lines = ",\n    ".join(parts)
    return f"{name}({', '.join(parts)})" if len(name) + sum(map(len, parts)) < 90 else f"{name}(\n    {lines},\n)"


def documented(found: object) -> str:
    """Return a docstring as text: its first paragraph as it is, the rest as it is laid out."""
    first, _, rest = (inspect.getdoc(found) or "").partition("\n\n")
    return first + (f"\n\n```text\n{rest}\n```" if rest else "")
