"""Flags of Megatron-LM's own inference tests give the same settings by its parser as by this package's.

The environment variable `MEGATRON_CASES` names a folder with its `test_cases`; without it this module is not collected
(see conftest.py).
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import yaml

from arguments import parse_arguments
from megatron_ext import add_inference_args, settings_from_args
from megatron_ext.api.loading import read_settings
from megatron_ext.config import InferenceSettings
from megatron_ext.errors import ConfigError
from tests.unit_tests.support.megatron_cases import words_of
from tests.unit_tests.support.megatron_parsers import megatron_parser

ROOT = Path(os.environ["MEGATRON_CASES"])
FILES = [path for path in sorted(ROOT.glob("**/model_config.yaml")) if yaml.safe_load(path.read_text())["MODEL_ARGS"]]
VARIABLES = ("CHECKPOINT_LOAD_PATH", "INFERENCE_OUTPUT_PATH", "DATA_PATH")
# Flags that the files of the version still have, and its parsers do not.
GONE = {f"--inference-dynamic-batching-buffer-{name}" for name in ("guaranteed-fraction", "overflow-factor")}
GONE |= {"--inference-dynamic-batching-max-requests-override", "--suspend-timeout"}
COMPARED = ("source", "model_overrides", "parallel", "sampling", "batching", "cache", "speculation")


def described(settings: InferenceSettings) -> dict[str, object]:
    return {name: getattr(settings, name) for name in COMPARED}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.parent.relative_to(ROOT)))
def test_settings_equal_those_of_the_command_line(path: Path, monkeypatch):
    """A line that is refused is refused for the same reason."""
    for name in VARIABLES:
        monkeypatch.setenv(name, "folder")
    parser = add_inference_args(megatron_parser("0.16.1" if "core_v0.16.1" in path.parts else "0.19.2"))
    words = words_of(yaml.safe_load(path.read_text())["MODEL_ARGS"])
    namespace, unknown = parser.parse_known_args(words)
    assert {word for word in unknown if word.startswith("--")} <= GONE
    try:
        expected = parse_arguments(words)
    except ConfigError as error:
        reason = str(error).partition(" is refused: ")[2]
        assert reason
        with pytest.raises(ConfigError, match=re.escape(reason)):
            settings_from_args(namespace)
        return
    found = described(read_settings(settings_from_args(namespace)))
    unequal = {"typed": ()}  # spellings of flags, for messages
    assert vars(found.pop("source")) | unequal == vars(expected.source) | unequal
    assert found == {name: value for name, value in described(expected).items() if name != "source"}
