"""PY-16: paths that cannot be used are told before torch is imported, which takes seconds."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from megatron_ext.commands import early_checks
from megatron_ext.config import CacheConfig, InferenceSettings
from tests.unit_tests.support.source import ROOT

COMMANDS = [
    ("run --load nowhere", "--load nowhere does not exist"),
    ("run org/name", "hf download org/name"),
    ("run --load-hf folder", "GGUF is not supported"),
    ("run empty", "empty has no config.json"),
    ("run quantized", "quantization_config = {'bits': 4} is not supported; supported is None; give the folder of the"),
    ("run --save file/x", "--save file/x cannot be written"),
    ("run --prompt-file nowhere.jsonl", "--prompt-file nowhere.jsonl: No such file"),
    ("run --output-path nowhere/out.json", "the folder nowhere does not exist"),
    ("run --profile file/x", "--profile file/x: Not a directory"),
    ("run --prefix-cache-dir file/x", "--prefix-cache-dir file/x: Not a directory"),
    ("run --prefix-cache-dir folder", "folder has other files and no prefix_cache_marker"),
    ("run --chat-template nowhere", "--chat-template nowhere: No such file or directory"),
    (
        "serve --chat-template broken.jinja --dry-run",
        "broken.jinja: the chat template is broken, line 2",
    ),
    ("serve --load-hf nowhere", "--load-hf nowhere does not exist"),
    ("serve --api-key-file nowhere", "--api-key-file nowhere: No such file"),
    ("serve --prefix-cache-dir file/x", "--prefix-cache-dir file/x: Not a directory"),
]
CODE = """
import contextlib, io, json, sys
from megatron_ext.commands.main import main
found = []
for words in json.loads(sys.argv[1]):
    with contextlib.redirect_stderr(io.StringIO()) as said:
        code = main(words.split())
    found.append((code, said.getvalue(), sorted({"torch", "numpy", "megatron"} & set(sys.modules))))
print(json.dumps(found))
"""


def test_bad_paths_are_told_before_torch_is_imported(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "broken.jinja").write_text("{{ messages }}\n{% if %}")
    (tmp_path / "empty").mkdir()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a.gguf").touch()
    (tmp_path / "quantized").mkdir()
    (tmp_path / "quantized" / "config.json").write_text('{"quantization_config": {"bits": 4}}')
    words = [sys.executable, "-c", CODE, json.dumps([command for command, _ in COMMANDS])]
    done = subprocess.run(
        words, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True
    )
    for (command, expected), (code, said, imported) in zip(COMMANDS, json.loads(done.stdout), strict=True):
        assert (code, said.count("\n"), imported) == (2, 1, []), (command, said)
        assert said.startswith(f"megatron-ext {command.split()[0]}: error: "), command
        assert expected in said, command


@pytest.mark.parametrize("is_optional", [True, False])
def test_the_directory_of_the_cache_is_made_unless_it_may_be_missing(is_optional, tmp_path):
    cache = CacheConfig(prefix_cache_dir=str(tmp_path / "new"), prefix_cache_dir_optional=is_optional)
    early_checks.check_paths(InferenceSettings(cache=cache))
    assert (tmp_path / "new").exists() is not is_optional


def test_ranks_of_a_world_meet_before_one_of_them_ends(monkeypatch, tmp_path):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    early_checks.check_paths(InferenceSettings(cache=CacheConfig(prefix_cache_dir=str(tmp_path / "new"))))
    assert not (tmp_path / "new").exists()
