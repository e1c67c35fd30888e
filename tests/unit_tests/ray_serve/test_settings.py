"""Settings of an application under Ray Serve: texts of `serve run`, and typed values of Python; Ray is not needed."""

from __future__ import annotations

import sys

import pytest

from megatron_ext.errors import ConfigError
from megatron_ext.ray_serve import app, build_app
from megatron_ext.ray_serve.settings import read_app_settings


def test_texts_and_typed_values_give_equal_settings():
    """`serve run ... name=value` and the Python builder mean the flags of tools/run_server.py."""
    texts = read_app_settings(
        {
            "num_replicas": "2",
            "num_cpus": "0.5",
            "served_model_name": "m",
            "inference_dynamic_batching_block_size": "16",
            "access_log": "false",
            "allowed_hosts": "a",
            "enable_admin_routes": "True",
        }
    )
    typed = read_app_settings(
        {
            "model": "embedded",
            "num_replicas": 2,
            "num_cpus": 0.5,
            "served_model_name": "m",
            "inference_dynamic_batching_block_size": 16,
            "access_log": False,
            "allowed_hosts": ["a"],
            "enable_admin_routes": True,
            "load": None,
        }
    )
    assert texts == typed
    server = texts.server
    assert (server.server.served_model_name, server.batching.block_size) == (("m",), 16)
    assert (server.server.access_log, server.server.allowed_hosts) == (False, ("a",))
    assert texts.deployment.num_replicas == 2
    assert texts.deployment.actor_options == {"num_cpus": 0.5}


def test_ranks_of_a_replica():
    """RP-6: parallel sizes give the ranks of a replica, each with a bundle of the resources of one."""
    settings = read_app_settings(
        {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": "2", "num_gpus": 1, "num_cpus": 0}
    )
    assert settings.ranks == 4
    assert settings.deployment.bundle == {"GPU": 1}
    assert read_app_settings({}).ranks == 1
    assert read_app_settings({"num_cpus": 2}).deployment.bundle == {"CPU": 2}


@pytest.mark.parametrize(
    ("given", "part"),
    [
        ({"num_replica": 1}, "did you mean num_replicas?"),
        ({"inference_dynamic_batching_block_sizes": 1}, "did you mean inference_dynamic_batching_block_size?"),
        ({"num_replicas": "two"}, "num_replicas='two' is not a number"),
        ({"num_replicas": 0}, "num_replicas 0 must be between 1 and"),
        ({"model": 3}, "is not a directory"),
        ({"model": "/a", "load_hf": "/b"}, "contradict each other"),
        ({"port": 8000}, "Ray's proxies listen"),
        ({"save": "/a"}, "each replica would write it"),
        ({"access_log": "maybe"}, "access_log='maybe' is not"),
        ({"max_replicas": 2, "num_replicas": 3}, "num_replicas=3 must be from min_replicas=1 to max_replicas=2"),
        ({"min_replicas": 2, "num_replicas": 2}, "without max_replicas"),
        ({"max_replicas": 2, "target_ongoing_requests": 0}, "must be more than 0"),
        ({"waiting_tokens_per_replica": 500}, "give target_ongoing_requests"),
        ({"max_surge_percent": 101}, "between 0 and 100"),
        ({"weights": "a"}, "needs weights_root"),
        ({"tensor_model_parallel_size": 2, "num_cpus": 0}, "Ray cannot place them"),
        ({"placement_group_strategy": "NEAR"}, "one of PACK, STRICT_PACK"),
    ],
)
def test_mistakes_are_named(given: dict[str, object], part: str):
    """Settings are refused in one line, before anything is deployed."""
    with pytest.raises(ConfigError) as raised:
        read_app_settings(given)
    assert part in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("build", [build_app, lambda: app({})])
def test_without_ray_the_extra_is_named(build, monkeypatch: pytest.MonkeyPatch):
    """The package works without Ray, and says what to install where it is needed."""
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "megatron_ext.ray_serve.deployment", raising=False)
    with pytest.raises(ConfigError, match=r"\[ray\]"):
        build()


def test_scaling_becomes_options_of_ray():
    """RP-6: without a maximum the number of replicas is fixed; with one Ray decides, and an ingress routes."""
    fixed = read_app_settings({"num_replicas": 3})
    assert fixed.deployment.scaling_options == {"num_replicas": 3, "max_surge_percent": 0}
    given = {"max_replicas": "4", "min_replicas": "1", "target_ongoing_requests": "5", "scaling_window": "6"}
    settings = read_app_settings({**given, "num_replicas": 2, "downscale_delay": 60})
    scaling = settings.deployment
    options = scaling.scaling_options["autoscaling_config"]
    assert (options["min_replicas"], options["initial_replicas"], options["max_replicas"]) == (1, 2, 4)
    assert (options["metrics_interval_s"], options["look_back_period_s"]) == (2.0, 6.0)
    assert (options["target_ongoing_requests"], options["downscale_delay_s"]) == (5.0, 60)
    assert read_app_settings({"max_replicas": 2}).routes_by_prefix


def test_weights_become_a_configuration_of_running_replicas():
    """RP-6: a replica reads them when it starts, and when they change."""
    settings = read_app_settings({"weights": "a", "weights_root": "/w", "enable_admin_routes": True})
    assert settings.deployment.scaling_options["user_config"] == {"weights": "a"}
