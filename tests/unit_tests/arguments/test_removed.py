"""Names of earlier versions are refused in one line, wherever users wrote them down."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import pytest

from arguments import parse_arguments, parse_server_arguments
from arguments.removed import removed
from megatron_ext.api.loading import read_settings
from megatron_ext.commands.main import COMMANDS, main
from megatron_ext.errors import ConfigError

FLAG, VALUE = "--a-removed-flag", ("--inference-dynamic-batching-prefix-caching-eviction-policy", "a_removed_one")


@pytest.fixture(autouse=True)
def names(monkeypatch: pytest.MonkeyPatch) -> None:
    """One name of each kind, so that the tests do not depend on the file."""
    found: Mapping[str, object] = {
        "flags": {FLAG: "give --another"},
        "values": {VALUE[0]: {VALUE[1]: "lru is the default"}},
        "commands": {"stroll": "use walk"},
    }
    monkeypatch.setattr("arguments.removed.removed", found.__getitem__)


def refused(work: Callable[[], object]) -> str:
    with pytest.raises(ConfigError) as caught:
        work()
    return str(caught.value)


@pytest.mark.parametrize("parse", [parse_arguments, parse_server_arguments])
@pytest.mark.parametrize("words", [[FLAG], [FLAG, "4"], [f"{FLAG}=4"], ["--seed", "1", FLAG.replace("d-", "d_")]])
def test_a_flag(parse, words):
    assert refused(lambda: parse(words)) == f"{FLAG} was removed in 0.3.0: give --another"


@pytest.mark.parametrize("words", [list(VALUE), ["=".join(VALUE)]])
def test_a_value(words):
    assert refused(lambda: parse_arguments(words)) == f"{' '.join(VALUE)} was removed in 0.3.0: lru is the default"
    assert parse_arguments([VALUE[0], "lru"])


def test_in_a_file(tmp_path):
    path = tmp_path / "flags.yaml"
    for (flag, value), text in (((FLAG, "4"), "give --another"), (VALUE, "lru is the default")):
        path.write_text(f"{flag[2:]}: {value}\n")
        assert refused(lambda: parse_arguments(["--model-config", str(path)])).endswith(f"was removed in 0.3.0: {text}")


def test_nested_forms_of_megatron(tmp_path):
    """MF-2: files of its functional tests and of `--yaml-cfg`."""
    path = tmp_path / "model_config.yaml"
    path.write_text("ENV_VARS: {}\nMODEL_ARGS:\n  --stop-words: [a b]\n")
    error = refused(lambda: parse_arguments(["--model-config", str(path)]))
    assert error.startswith(f"{path}, line 2: MODEL_ARGS of Megatron's functional tests was removed in 0.3.0: write ")
    assert "give the flags, or --model-config" in refused(lambda: parse_arguments(["--yaml-cfg", str(path)]))


def test_in_python():
    assert refused(lambda: read_settings({"a_removed_flag": 4})).startswith("a_removed_flag was removed in 0.3.0: ")
    key = VALUE[0][2:].replace("-", "_")
    assert refused(lambda: read_settings({key: VALUE[1]})).startswith(f"{key} {VALUE[1]} was removed in 0.3.0: ")


def test_a_command(capsys):
    assert main(["stroll", "--far"]) == 2
    assert capsys.readouterr().err == "megatron-ext: error: megatron-ext stroll was removed in 0.3.0: use walk\n"


def test_the_file(monkeypatch, capsys):
    """Each name of the file is one that no parser knows, and has one line of text without an end."""
    monkeypatch.undo()
    flags, values, commands, of_simulate = (removed(kind) for kind in ("flags", "values", "commands", "simulate"))
    texts = [*flags.values(), *commands.values(), *of_simulate.values()]
    texts += [text for one in values.values() for text in one.values()]
    assert [text for text in texts if not re.fullmatch(r"[^\n]+[^.\n]", str(text))] == []
    assert [name for name in (*flags, *of_simulate) if not re.fullmatch(r"--[a-z][a-z0-9-]*", name)] == []
    for words in [[flag] for flag in flags] + [[flag, value] for flag, one in values.items() for value in one]:
        assert f"{' '.join(words)} was removed" in refused(lambda words=words: parse_arguments(words))
    for flag in of_simulate:
        assert main(["simulate", flag]) == 2
        assert capsys.readouterr().err.startswith(f"megatron-ext simulate: error: {flag} was removed in 0.3.0: ")
    assert not commands.keys() & COMMANDS.keys()
