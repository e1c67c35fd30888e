"""Flags of routing: one group for runs, servers and the Python interface."""

from __future__ import annotations

from pathlib import Path

import pytest

from arguments import parse_arguments, parse_server_arguments
from megatron_ext.api.loading import read_settings
from megatron_ext.config.routing import RoutingConfig, RoutingPolicyName
from megatron_ext.errors import ConfigError

CACHING = "--inference-dynamic-batching-prefix-caching"
POLICY, ALPHA = f"{CACHING}-coordinator-policy", f"{CACHING}-routing-alpha"


def of_python(**given: object) -> RoutingConfig:
    return read_settings({name[2:].replace("-", "_"): value for name, value in given.items()}).routing


@pytest.mark.parametrize("parse", [parse_arguments, parse_server_arguments])
class TestCommandLines:
    def test_the_default_is_our_own_policy(self, parse):
        assert parse([]).routing == RoutingConfig("least_computed", 0.5)

    @pytest.mark.parametrize("policy", [one.value for one in RoutingPolicyName])
    def test_each_policy(self, parse, policy: str):
        assert parse([POLICY, policy, ALPHA, "0.25"]).routing == RoutingConfig(policy, 0.25)

    @pytest.mark.parametrize(("flag", "value"), [(POLICY, "nonsense"), (ALPHA, "1.5"), (ALPHA, "nan")])
    def test_a_mistake_is_one_line_with_the_value(self, parse, flag: str, value: str):
        with pytest.raises(ConfigError, match=value) as caught:
            parse([flag, value])
        assert "\n" not in str(caught.value)


def test_in_python():
    assert of_python(**{POLICY: "load_balanced", ALPHA: 1}) == RoutingConfig("load_balanced", 1.0)
    with pytest.raises(ConfigError, match="'nonsense' is unknown; one of least_computed, longest_prefix"):
        of_python(**{POLICY: "nonsense"})


def test_a_yaml_file_has_megatrons_flags(tmp_path: Path):
    """The flags of Megatron's DP configurations set the policy; its coordinator itself has nothing left to do."""
    file = tmp_path / "model_config.yaml"
    file.write_text(f"use-coordinator: true\n{POLICY[2:]}: longest_prefix\n{ALPHA[2:]}: 0.75\n")
    settings = parse_arguments(["--model-config", str(file)])
    assert settings.routing == RoutingConfig("longest_prefix", 0.75)
    assert [line for line in settings.start_notes if "--use-coordinator" in line and POLICY not in line]
