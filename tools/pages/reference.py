"""Reference pages made from the code: flags, routes, metrics, and the names of the Python package."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
from collections.abc import Iterable, Iterator, Mapping

from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from tools.pages.json_fields import described
from tools.pages.markdown import plain, table


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
        "`/docs` of a running server has types, defaults and examples; [the API](../server.md) explains the fields. "
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
        "[monitoring](../monitoring.md) says which ones to watch. Metrics of audits, of the disk and of drafts by "
        "position exist only where these are switched on.\n\n"
    )
    rows = [
        [f"`{metric_name(family)}`", family.type, plain(family.documentation) + labels_of(family)]
        for family in sorted(metric_families(), key=lambda family: family.name)
    ]
    return text + table(["name", "type", "meaning"], rows)


def metric_families() -> list[Metric]:
    """Return what `/metrics` shows on a server with audits, entries on disk, drafts and an explained request."""
    from megatron_ext.engine.cache_audit import AuditCounts
    from megatron_ext.engine.statistics import EngineStatistics
    from megatron_ext.prefix_cache.cache import CacheUse
    from megatron_ext.prefix_cache.disk.store_use import DiskUse, StoreUse
    from megatron_ext.prefix_cache.disk.tier_storage import TierCounts
    from megatron_ext.scheduling.counters import Counters
    from megatron_ext.scheduling.explanation import Explanation, MissReason
    from megatron_ext.scheduling.spec_decode.draft_counts import SpeculationUse
    from megatron_ext.server.monitoring.metrics import Metrics

    no_use = CacheUse(**{field.name: 0 for field in dataclasses.fields(CacheUse)})
    disk = DiskUse(StoreUse(limit_bytes=0), loaded=0, left_out=0, tier=vars(TierCounts()))
    drafts = SpeculationUse([0], [0])
    served = Metrics("NAME")
    served.state = EngineStatistics(0, 0, 0, 0, 0, True, no_use, Counters(), drafts, AuditCounts(), disk)
    served.observe_explanation(Explanation(MissReason.PARTED.value, 0, 0, most=1, block_size=1, agreeing=1))
    text = served.render().decode()
    return [family for family in text_string_to_metric_families(text) if not family.name.endswith("_created")]


def metric_name(family: Metric) -> str:
    """Return the name under which queries find a metric."""
    return family.name + ("_total" if family.type == "counter" else "")


def labels_of(family: Metric) -> str:
    """Return a sentence on the labels of a metric, with their values where a new server has them all."""
    values: dict[str, list[str]] = {}
    for sample in family.samples:
        for label, value in sample.labels.items():
            if label != "le" and value not in values.setdefault(label, []):
                values[label].append(value)
    shown = [f"`{label}`" + (f": {', '.join(known)}" if len(known) > 1 else "") for label, known in values.items()]
    return f". Labels: {'; '.join(shown)}" if shown else ""


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
