"""The command: paths, arguments, errors and exit codes of a script."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from megatron_ext.errors import ConfigError
from megatron_ext.mcore.upstream_version import found_version
from megatron_ext.megatron_lm.run import checkout_of, main

REPORT = """
import json, sys
from pathlib import Path
from megatron.core.inference.engines import DynamicInferenceEngine
found = {"argv": sys.argv, "path": [sys.path[0], sys.path[-1]], "name": __name__}
found["engine"] = DynamicInferenceEngine.__module__
Path(sys.argv[1]).write_text(json.dumps(found))
"""


@pytest.fixture
def tree(tmp_path) -> Path:
    """A checkout with a script that reports what it finds."""
    folder = tmp_path / "lm"
    for one in ("examples/inference", "megatron/training", "megatron/core"):
        (folder / one).mkdir(parents=True)
    (folder / "examples/inference/report.py").write_text(REPORT, "utf-8")
    write_version(folder, *found_version())
    return folder


def write_version(folder: Path, major: int, minor: int, patch: int) -> None:
    text = f"MAJOR = {major}\nMINOR = {minor}\nPATCH = {patch}\n"
    (folder / "megatron/core/package_info.py").write_text(text, "utf-8")


def test_a_script_runs_as_with_python(tree, tmp_path):
    """The path begins with its folder and ends with its checkout, and flags are its own; then all is as before."""
    before = list(sys.path), list(sys.argv)
    script, output = tree / "examples/inference/report.py", tmp_path / "found.json"
    assert main([str(script), str(output), "--load", "x", "--setting", "y"]) == 0
    assert json.loads(output.read_text("utf-8")) == {
        "argv": [str(script), str(output), "--load", "x", "--setting", "y"],
        "path": [str(script.parent), str(tree)],
        "name": "__main__",
        "engine": "megatron_ext.megatron_lm.constructors",
    }
    assert (sys.path, sys.argv) == before


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["missing.py"], "missing.py"),
        (["--setting", "block_size", "missing.py"], "block_size"),
        (["--setting", "block_size=[", "missing.py"], "'block_size=[' has a value that is not YAML"),
    ],
)
def test_mistakes_are_reported_in_one_line(options, named, capsys):
    assert main(options) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert named in line


def test_a_checkout_of_another_version_is_refused(tree):
    script = tree / "examples/inference/report.py"
    assert checkout_of(script) == tree
    write_version(tree, 0, found_version().minor + 1, 0)
    with pytest.raises(ConfigError, match=f"0.{found_version().minor + 1}.0"):
        checkout_of(script)


def test_settings_reach_the_engine(run_script):
    """Without prefix caching both prompts are computed; an unknown setting is an error."""
    flags = ("--skip-prompt-log-probs", "--null-library", "null" if found_version() < (0, 17) else "null-text")
    results = run_script("gpt/by_hand.py", "llama", *flags, options=("--setting", "enable_prefix_caching=false"))
    assert results["prefill_tokens"] == sum(len(one["prompt_tokens"]) for one in results["requests"])
    with pytest.raises(AssertionError, match="2 == 0"):
        run_script("gpt/by_hand.py", "llama", *flags, options=("--setting", "nonsense=1"))
