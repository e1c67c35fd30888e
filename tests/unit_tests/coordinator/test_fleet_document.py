"""RP-6: docs/fleet.md speaks of flags, routes and metrics that are there."""

from __future__ import annotations

import re

from arguments import build_coordinator_parser, build_server_parser
from megatron_ext.config.coordinator import CoordinatorConfig
from megatron_ext.coordinator.app import create_app
from megatron_ext.coordinator.coordination import Coordination
from tests.unit_tests.support.source import ROOT

TEXT = (ROOT / "docs/fleet.md").read_text("utf-8")
OURS = TEXT.split("## Behind another router")[0]


def test_flags():
    parsers = build_coordinator_parser(), build_server_parser()
    known = {option for parser in parsers for action in parser._actions for option in action.option_strings}
    named = set(re.findall(r"(?<![\w-])--[a-z][\w-]*\w", OURS))
    assert sorted(named - known) == []
    assert {flag for flag in known & named if "routing-alpha" in flag or "replica-timeout" in flag}


def test_routes_and_metrics():
    coordination = Coordination(CoordinatorConfig(api_key="k", enable_admin_routes=True))
    app = create_app(coordination)
    routes = set(app.openapi()["paths"])
    table = OURS.split("### Operated")[1].split("\n\n")[0]
    named = {
        one for row in table.splitlines() for one in re.findall(r"`(?:GET |POST )?(/[\w/]*)`", row.split(" | ")[0])
    }
    assert len(named) > 15
    assert sorted(named - routes) == []
    coordination.metrics.moved("http://a", "lost")
    shown = coordination.metrics.render().decode()
    row = next(line for line in table.splitlines() if "/metrics" in line)
    for metric in re.findall(r"`([a-z_]+)`", row.split(" | ")[1])[:-1]:
        assert f"megatron_ext_coordinator_{metric}" in shown, metric
