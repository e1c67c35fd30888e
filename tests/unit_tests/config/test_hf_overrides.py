"""FA-2: `--hf-overrides`: changes of fields, and values that are no object."""

from __future__ import annotations

import json

import pytest

from arguments.parser import parse_arguments, parse_server_arguments
from megatron_ext.config.source import HfOverrides
from megatron_ext.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "raw", "expected"),
    [
        ('{"a": 1, "b": null}', {"a": 0, "b": 2, "c": 3}, {"a": 1, "b": None, "c": 3}),
        ('{"rope_scaling": {"factor": 2}}', {"rope_scaling": {"type": "x"}}, {"rope_scaling": {"factor": 2}}),
        ('{"text_config": {"a": 1}}', {"text_config": {"a": 0, "b": 2}}, {"text_config": {"a": 1, "b": 2}}),
        ('{"text_config": {"a": 1}}', {"x": 1}, {"x": 1, "text_config": {"a": 1}}),
    ],
)
def test_overrides(text: str, raw: dict, expected: dict) -> None:
    assert HfOverrides.of(text).over(raw) == expected
    assert HfOverrides.of(json.loads(text)) == HfOverrides.of(text)


@pytest.mark.parametrize("parse", [parse_arguments, parse_server_arguments])
@pytest.mark.parametrize(
    ("text", "named"), [("[1]", "is not a JSON object of fields"), ("{", "is not a JSON object"), ("3", "is not a")]
)
def test_overrides_that_are_no_object(text: str, named: str, parse) -> None:
    with pytest.raises(ConfigError, match=named):
        parse(["--load-hf", "x", "--hf-overrides", text])
