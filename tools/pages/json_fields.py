"""Reference page of JSON fields: results of a run, records, and what the server takes and gives beyond OpenAI's API.

Names come from what writes the JSON: entries and counts are made of sample values, with all options on. Meanings come
from docstrings and comments of the dataclasses, or from `json_meanings`. A name without a meaning is an error.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tools.pages.attributes import Field, fields_of
from tools.pages.json_meanings import ANSWERS, RECORD, REQUEST, RUN, TOLD
from tools.pages.markdown import table

ROOT = Path(__file__).resolve().parents[2]


def json_fields() -> str:
    """Return the page of JSON fields.

    Raises:
        ValueError: A field has no meaning.
    """
    text = (
        "# JSON fields\n\nLook up a field of results, records, bodies and answers. This page is made from the code; "
        "[run prompts](../running.md#output) says which file has what, [the API](../server.md) what bodies mean.\n\n"
        "## Results of a request\n\nThe file of `--output-path` has these for each request, and Megatron's counts of "
        "the run.\n\n"
    )
    text += rows_of(((name, kind(value)) for name, value in sample_entry().items()), REQUEST)
    text += "\n## Explanation of a prompt\n\n`prefix_cache_explanation` of results and of the server's answers; the "
    text += "server leaves out `here` and `there`.\n\n" + rows_of(explanation(), TOLD["prefix_cache_explanation"])
    text += "\n## Results of a run\n\n`OUT.run.json`, or `--output-format full` in the same file.\n\n"
    text += rows_of(((name, "") for name in RUN), RUN)
    for name, rows in objects().items():
        text += f"\n### {name}\n\n" + rows_of(rows, TOLD[name])
    return text + records() + bodies() + answers()


def rows_of(rows: Iterable[tuple[str, str] | tuple[str, str, str]], told: Mapping[str, str]) -> str:
    """Return a table of names, types and meanings; meanings in `told` win over a row's own."""
    found = []
    for name, type_, *said in rows:
        meaning = told.get(name) or "".join(said).removesuffix(".")
        if not meaning:
            raise ValueError(f"the field {name} has no meaning: add it to tools/pages/json_meanings.py")
        found.append([f"`{name}`", type_, meaning])
    has_types = any(row[1] for row in found)
    head = ["field", "type", "meaning"]
    return table(head, found) if has_types else table(head[::2], [row[::2] for row in found])


def kind(value: object) -> str:
    """Return the JSON type of a value."""
    names = {bool: "boolean", int: "integer", float: "number", str: "string", dict: "object", type(None): "null"}
    if isinstance(value, list):
        return f"list of {kind(value[0]).replace('list', 'lists', 1)}".rstrip("s") + "s"
    return names[type(value)]


def sample_entry() -> dict[str, object]:
    """Return the entry of a request that has everything which an entry can have."""
    from megatron_ext.engine.statistics import StepCounts
    from megatron_ext.offline.passes import Pass
    from megatron_ext.offline.results import RequestEntries
    from megatron_ext.scheduling.explanation import Explanation
    from megatron_ext.scheduling.record import RequestRecord, Status
    from megatron_ext.scheduling.request_events import Event, EventType
    from megatron_ext.scheduling.routing_indices import RoutingIndices

    record = RequestRecord(
        request_id=0,
        status=Status.COMPLETED,
        finish_reason="length",
        error="",
        prompt_text="",
        prompt_tokens=(1,),
        generated_text="",
        generated_tokens=(2,),
        prompt_log_probs=(-0.5,),
        generated_log_probs=(-0.5,),
        prompt_top_n_log_probs=({1: -0.5},),
        generated_top_n_log_probs=({2: -0.5},),
        routing_indices=RoutingIndices(b"\0\0\0\0", 1, 1),
        events=(Event(EventType.ADD_ENGINE, 0.0),),
        arrival_wall_time=0.0,
        latency=0.5,
        ttft=0.5,
        step_count=1,
        matched_block_count=0,
        skipped_prefill_token_count=0,
        computed_prefill_token_count=1,
        recomputed_token_count=0,
        prefill_reasons={"last_token": 1},
        prefix_cache_explanation=Explanation("prompt_logprobs", 0, 0, 0, 64),
    )
    options = {field.name: True for field in dataclasses.fields(RequestEntries) if field.name.startswith("with_")}
    entries = RequestEntries(lambda record: "", lambda tokens, skip_special_tokens: "", **options)
    return entries.entry(record) | entries.counts(Pass((record,), 0.5, StepCounts()))


def explanation() -> Iterator[tuple[str, str, str]]:
    """Yield the rows of an explanation."""
    from megatron_ext.scheduling.explanation import Explanation

    known = fields_of(Explanation)
    for name in Explanation("prompt_logprobs", 0, 0, 0, 64).to_dict(("", "")):
        yield (
            name,
            json_type(known[name].type) if name in known else "string",
            as_json(known[name].meaning if name in known else ""),
        )


def objects() -> dict[str, list[tuple[str, str, str]]]:
    """Return the rows of each object of a run's counts: names as they are written, meanings as classes have them."""
    from megatron_ext.engine.cache_audit import AuditCounts
    from megatron_ext.engine.statistics import EngineStatistics
    from megatron_ext.memory.budget import KVCacheConfig
    from megatron_ext.prefix_cache.cache import CacheUse
    from megatron_ext.prefix_cache.disk.store_use import DiskUse, StoreUse
    from megatron_ext.prefix_cache.disk.tier_storage import TierCounts
    from megatron_ext.scheduling.counters import Counters
    from megatron_ext.scheduling.spec_decode.draft_counts import SpeculationUse

    speculation = SpeculationUse([0], [0])
    disk = DiskUse(StoreUse(1), 0, 0, dataclasses.asdict(TierCounts()))
    use = CacheUse(**ones(CacheUse))
    whole = EngineStatistics(0, 0, 0, 0, 0, True, use, Counters(), speculation, AuditCounts(), disk)
    audits = {f"audit_{name}": field for name, field in fields_of(AuditCounts).items()}
    stored = fields_of(TierCounts) | fields_of(DiskUse) | fields_of(StoreUse)
    counted = fields_of(Counters) | fields_of(CacheUse) | audits
    return {
        "prefix_cache": list(named(whole.prefix_cache() or {}, counted)),
        "prefix_cache_lost": list(named(whole.prefix_cache_lost() or {}, {})),
        "speculation": list(named(speculation.shown(), {})),
        "geometry": list(named(fields_of(KVCacheConfig), fields_of(KVCacheConfig))),
        "prefix_cache_disk": list(named(whole.prefix_cache_disk() or {}, stored)),
    }


def ones(owner: type) -> dict[str, Any]:
    """Return values for all fields of a dataclass of counts."""
    return {field.name: 1 for field in dataclasses.fields(owner)}


def named(names: Iterable[str], known: Mapping[str, Field]) -> Iterator[tuple[str, str, str]]:
    """Yield a row for each name, with the meaning that a class gives it, if one does."""
    for name in names:
        yield name, "", as_json(known[name].meaning) if name in known else ""


def as_json(meaning: str) -> str:
    """Return a meaning with the name that None has in JSON."""
    return meaning.replace("None", "null")


def json_type(annotation: str) -> str:
    """Return the JSON types of an annotation."""
    names = {"int": "integer", "float": "number", "str": "string", "bool": "boolean", "None": "null"}
    return " or ".join(names.get(part, part) for part in annotation.split(" | "))


def records() -> str:
    """Return the section on the record that Python programs get."""
    from megatron_ext.scheduling.record import RequestRecord

    known = fields_of(RequestRecord)
    text = "\n## RequestRecord\n\nAttributes of what [Python programs](../python.md) get for each request.\n\n"
    rows = [(name, f"`{field.type}`", field.meaning) for name, field in known.items()]
    return text + rows_of(rows, {name: said for name, said in REQUEST.items() if name in known} | RECORD)


def described() -> dict[str, Any]:
    """Return the OpenAPI description of a server with all routes."""
    from fastapi import FastAPI

    from megatron_ext.server.app import ADMIN_ROUTERS, ROUTERS
    from megatron_ext.server.http.description import install_description

    app = FastAPI()
    for router in (*ROUTERS, *ADMIN_ROUTERS):
        app.include_router(router)
    install_description(app, open_paths=frozenset(), has_keys=False)
    return app.openapi()


def bodies() -> str:
    """Return the section on the fields of bodies: an object each, as the server's OpenAPI description has it."""
    text = "\n## Fields of bodies\n\n[Routes](routes.md) say which route has which body.\n"
    for name, one in sorted(described()["components"]["schemas"].items()):
        fields = one.get("properties", {}).items()
        rows = [[f"`{field}`", part["description"]] for field, part in fields if "description" in part]
        if rows:
            text += f"\n### {name}\n\n{one.get('description', '')}\n\n" + table(["field", "meaning"], rows)
    return text


def answers() -> str:
    """Return the section on fields of answers that OpenAI's API lacks."""
    text = "\n## Fields of answers beyond OpenAI's\n\n`/v1/completions` and `/v1/chat/completions`.\n\n"
    return text + rows_of(((name, "") for name in ANSWERS), ANSWERS)
