"""PY-19: files of examples/deploy: flags that exist, and values on which proxy, unit and server agree."""

from __future__ import annotations

import configparser
import re
import shlex
from collections.abc import Sequence

import yaml

from arguments.parser import build_server_parser, parse_server_arguments
from megatron_ext.server.http.auth import ADMIN_PATHS
from tests.unit_tests.support.source import ROOT

FOLDER = ROOT / "examples" / "deploy"
PROXY = (FOLDER / "nginx.conf").read_text("utf-8")
OPTIONS = {option for action in build_server_parser()._actions for option in action.option_strings}


def unknown_flags(words: Sequence[str]) -> set[str]:
    return {word.partition("=")[0] for word in words if word.startswith("--")} - OPTIONS


def test_the_unit_starts_a_server():
    unit = configparser.ConfigParser(interpolation=None, strict=False)
    unit.optionxform = str
    unit.read_string((FOLDER / "megatron_ext.service").read_text("utf-8"))
    service = unit["Service"]
    program, command, *words = shlex.split(service["ExecStart"])
    assert (program.rpartition("/")[2], command) == ("megatron-ext", "serve")
    assert unknown_flags(words) == set()
    assert int(service["TimeoutStopSec"]) > int(words[words.index("--shutdown-timeout") + 1])


def test_the_containers_start_a_server_behind_the_proxy():
    services = yaml.safe_load((FOLDER / "compose.yaml").read_text("utf-8"))["services"]
    command, *words = services["server"]["command"]
    assert command == "serve"
    assert unknown_flags(words) == set()
    words.remove("/model")  # a folder of the container
    assert set(parse_server_arguments(words).server.allowed_hosts) == {
        *re.findall(r"server_name (\S+);", PROXY),
        "127.0.0.1",
    }
    image = (FOLDER / services["server"]["build"] / "Dockerfile").read_text("utf-8")
    assert "http://127.0.0.1:8000/health" in image, "a host that is allowed"
    assert services["proxy"]["network_mode"] == "service:server"


def test_the_proxy_passes_on_what_the_server_needs():
    assert PROXY.count("{") == PROXY.count("}")
    for line in ("proxy_buffering off;", "proxy_set_header Host $host;"):
        assert line in PROXY
    assert set(re.findall(r"--[\w-]+", PROXY)) <= OPTIONS


def test_the_proxy_keeps_operators_routes_inside():
    (denied,) = re.findall(r"location ~ (\S+) \{\s+deny all;", PROXY)
    assert [path for path in (*ADMIN_PATHS, "/metrics", "/metrics/history") if not re.search(denied, path)] == []
    assert not any(re.search(denied, path) for path in ("/v1/chat/completions", "/health", "/tokenize", "/load"))
