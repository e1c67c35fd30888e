"""PY-19: dashboard and alerts of examples/monitoring against the metrics that a server has."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest
import yaml

from tests.unit_tests.support.source import ROOT
from tools.pages.reference import metric_families, metric_name

FOLDER = ROOT / "examples" / "monitoring"
PROMETHEUS_OWN = {"instance", "job"}  # labels that a scrape adds
SELECTED = re.compile(r"\b(up|megatron_ext_\w+)(?:\{([^}]*)\})?")
MATCHER = re.compile(r"(\w+)(?:=~|!~|!=|=)\"([^\"]*)\"")
AGGREGATED = re.compile(r"sum(?: by \([^)]*\) )?\((?:(?:rate|increase)\([^()]*\)|megatron_ext_[^()]*)\)")


def samples() -> dict[str, dict[str, set[str]]]:
    """Names of all samples: labels of each, and the values that a new server shows."""
    found: dict[str, dict[str, set[str]]] = {"up": {}}
    for family in metric_families():
        for sample in family.samples:
            labels = found.setdefault(sample.name, {})
            for label, value in sample.labels.items():
                labels.setdefault(label, set()).add(value)
    return found


SAMPLES = samples()


def mistakes(query: str) -> list[str]:
    """Names, labels and values of an expression that no server has, and vectors whose labels cannot match."""
    wrong, labels = [], set(PROMETHEUS_OWN)
    for name, matchers in SELECTED.findall(query):
        own = SAMPLES.get(name)
        if own is None:
            wrong.append(name)
            continue
        labels |= set(own)
        for label, pattern in MATCHER.findall(matchers):
            if label not in own and label not in PROMETHEUS_OWN:
                wrong.append(f"{name}{{{label}}}")
            elif label in own and label != "le":
                wrong += [one for one in pattern.split("|") if one not in own[label]]
    for by in re.findall(r"by \(([^)]*)\)", query):
        wrong += [label for label in by.split(", ") if label not in labels]
    if len(SELECTED.findall(query)) > 1:
        names = (name for name, _ in SELECTED.findall(AGGREGATED.sub("", query)))
        wrong += [f"{name} is not aggregated" for name in names if set(SAMPLES.get(name, ())) - PROMETHEUS_OWN]
    return wrong


def panels() -> Iterator[tuple[str, str]]:
    for panel in json.loads((FOLDER / "dashboard.json").read_text("utf-8"))["panels"]:
        for target in panel["targets"]:
            yield f"{panel['title']} {target['refId']}", target["expr"]


def alerts() -> Iterator[tuple[str, str]]:
    (group,) = yaml.safe_load((FOLDER / "alerts.yaml").read_text("utf-8"))["groups"]
    for rule in group["rules"]:
        assert rule["labels"]["severity"] in {"critical", "warning"}
        assert rule["annotations"]["summary"].endswith(".")
        yield rule["alert"], rule["expr"]


def documented() -> Iterator[tuple[str, str]]:
    text = (ROOT / "docs" / "monitoring.md").read_text("utf-8")
    yield from (("monitoring.md", one) for one in re.findall(r"`([^`]*\brate\([^`]*)`", text))


EXPRESSIONS = [pytest.param(query, id=name) for name, query in (*panels(), *alerts(), *documented())]


@pytest.mark.parametrize("query", EXPRESSIONS)
def test_expressions_ask_for_metrics_that_are_there(query):
    assert mistakes(query) == []


def test_every_topic_is_watched():
    assert len(EXPRESSIONS) > 40
    text = " ".join(str(param.values[0]) for param in EXPRESSIONS)
    topics = (
        "requests_total rejected waiting skipped computed first_token inter_token kv_blocks state_slots lost_blocks"
    )
    assert [one for one in f"{topics} audit_wrong disk_on disk_drops step_failures".split() if one not in text] == []


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("rate(megatron_ext_requests_ended_total[5m])", ["megatron_ext_requests_ended_total"]),
        ('megatron_ext_requests_total{outcome="fine"}', ["fine"]),
        ('megatron_ext_kv_blocks{outcome="stop"}', ["megatron_ext_kv_blocks{outcome}"]),
        ("sum by (reason) (rate(megatron_ext_requests_total[5m]))", ["reason"]),
        (
            "megatron_ext_kv_blocks > 0 and rate(megatron_ext_requests_total[5m]) == 0",
            ["megatron_ext_requests_total is not aggregated"],
        ),
    ],
)
def test_a_mistake_is_seen(query, expected):
    """The last one gives an empty vector: one side has a label that the other lacks."""
    assert mistakes(query) == expected


def test_the_page_names_metrics_that_are_there():
    text = (ROOT / "docs" / "monitoring.md").read_text("utf-8")
    rows = "\n".join(line.split("|")[1] for line in text.splitlines() if line.startswith("| `"))
    names = [name for name in re.findall(r"`(\w+)`", rows) if name not in {"outcome", "reason"}]
    known = set(map(metric_name, metric_families()))
    assert len(names) > 12
    assert [name for name in names if f"megatron_ext_{name}" not in known] == []
