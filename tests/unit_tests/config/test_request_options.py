"""Options of a request are declared once, and every place that sets them follows the declaration."""

from __future__ import annotations

import argparse
import math
import re
from dataclasses import dataclass
from typing import get_type_hints

import pytest
from pydantic import ValidationError

from arguments.flags import FlagGroup, normalize_key
from arguments.groups import GROUPS, MODEL, SERVER_GROUPS
from megatron_ext.config import ModelConfig, RequestParams
from megatron_ext.config.annotations import FieldType
from megatron_ext.config.options import option, options_of
from megatron_ext.errors import ConfigError
from megatron_ext.server.openai.protocol import ChatRequest, CompletionRequest
from tests.unit_tests.support.source import PACKAGE, ROOT, python_files

STEP = ("scheduling", "runner", "ops")  # what computes with the option


@dataclass(frozen=True)
class Made(RequestParams):
    """Request parameters with two options more."""

    warmth: float = option(0.5, "Warmth of the answer", flag="--warm", minimum=0, maximum=2, bounds="between 0 and 2")
    is_kind: bool = option(False, "Kind answers")


def test_an_option_is_named_in_two_files_outside_the_step():
    """Every place that sets `min_p` follows its declaration; a body has it as a field with a description."""
    paths = [*python_files(ROOT / "arguments"), *python_files(PACKAGE)]
    others = [path for path in paths if path.relative_to(ROOT).parts[1] not in STEP]
    naming = {str(path.relative_to(PACKAGE)) for path in others if re.search(r"\bmin_p\b", path.read_text("utf-8"))}
    assert naming == {"config/request.py", "server/openai/request_fields.py"}


def test_flags():
    group = FlagGroup("made", Made)
    parser = argparse.ArgumentParser()
    group.add_to(parser)
    assert vars(parser.parse_args([])) == {}
    given = vars(parser.parse_args(["--warm", "1.5", "--is-kind"]))
    assert given == {"warm": 1.5, "is-kind": True}
    assert "Warmth of the answer (default: 0.5)" in parser.format_help()
    assert "min_p" not in {flag.field for flag in group.flags}, "the flags of a base are its own group's"
    assert "seed" not in {flag.field for flag in FlagGroup("base", RequestParams).flags}, "no text, no flag"


CONFIGS = dict.fromkeys(ModelConfig if group is MODEL else group.config for group in (*GROUPS, *SERVER_GROUPS))
DECLARED = [(config, field) for config in CONFIGS for field in options_of(config)]


@pytest.mark.parametrize(("config", "field"), DECLARED, ids=lambda one: getattr(one, "__name__", one))
def test_every_option_is_checked(config: type, field: str):
    """Values outside of the declared bounds and choices are refused with the name, the value and what would do."""
    declared = options_of(config)[field]
    outside = [] if declared.choices is None else ["nonsense"]
    if declared.is_bounded:
        kind = FieldType.of(get_type_hints(config)[field]).item
        step = 1 if kind is int else 1e-6
        outside += [] if declared.minimum is None else [declared.minimum - step]
        outside += [] if declared.above is None else [declared.above]
        outside += [] if declared.maximum is None else [declared.maximum + max(step, abs(declared.maximum) / 2**20)]
        outside += [] if kind is int else [math.nan, math.inf]
    for value in outside:
        with pytest.raises(ConfigError) as caught:
            config(**{field: value})
        message = str(caught.value)
        name = field if config is RequestParams else declared.name(field)
        assert normalize_key(message).startswith(
            normalize_key(f"{name} {value if declared.is_bounded else repr(value)} ")
        )
        assert " must be " in message or " is unknown; one of " in message
        assert "\n" not in message


@pytest.mark.parametrize("value", [-0.1, 2.1, float("nan"), float("inf")])
def test_bounds(value):
    with pytest.raises(ConfigError, match=f"^warmth {value} must be between 0 and 2$"):
        Made(warmth=value)
    assert Made(warmth=2.0).warmth == 2.0


def test_bounds_of_whole_numbers_have_no_limit_of_floats():
    assert RequestParams(top_k=10**400).top_k == 10**400


@pytest.mark.parametrize("body", [CompletionRequest, ChatRequest])
def test_bodies_have_the_bounds_of_the_options(body):
    """Numbers outside are refused by name; those at the bounds are taken."""
    content = {"prompt": "a"} if body is CompletionRequest else {"messages": [{"role": "user", "content": "a"}]}
    bounded = {name: declared for name, declared in options_of(RequestParams).items() if declared.bounds}
    assert len(bounded) == 7
    for name, declared in bounded.items():
        for bound, outside in ((declared.minimum, -2), (declared.maximum, 2)):
            if bound is not None:
                assert getattr(body(**content, **{name: bound}), name) == bound
                with pytest.raises(ValidationError, match=name):
                    body(**content, **{name: bound + outside})
