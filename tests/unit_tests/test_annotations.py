"""The one check of values from outside against a dataclass's annotations."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from megatron_ext.config import ModelConfig, RequestParams
from megatron_ext.config.annotations import FieldType, MismatchError, field_types


@dataclass(frozen=True)
class Everything:
    count: int = 1
    share: float = 0.5
    name: str | None = None
    is_on: bool = False
    words: tuple[str, ...] = ()
    pair: tuple[str, str] | None = None
    places: tuple[int, ...] = ()


TYPES = field_types(Everything)


@pytest.mark.parametrize("config", [ModelConfig, RequestParams])
def test_every_field_from_outside_has_a_type(config):
    assert list(field_types(config)) == list(config.__dataclass_fields__)


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("count", 3, 3),
        ("share", 2, 2.0),
        ("share", 0.25, 0.25),
        ("name", "a", "a"),
        ("name", None, None),
        ("is_on", True, True),
        ("words", ["a", "b", "c"], ("a", "b", "c")),
        ("words", [], ()),
        ("pair", ("a", "b"), ("a", "b")),
        ("pair", None, None),
        ("places", [0, 4], (0, 4)),
    ],
)
def test_values_that_fit(field, value, expected):
    found = TYPES[field].convert(value)
    assert (found, type(found)) == (expected, type(expected))


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("count", 3.0, "a whole number"),
        ("count", True, "a whole number"),
        ("count", "3", "a whole number"),
        ("count", None, "a whole number"),
        ("share", False, "a number"),
        ("share", 10**400, "a number"),
        ("name", 3, "a text"),
        ("is_on", 1, "true or false"),
        ("words", "abc", "a list of texts"),
        ("words", [1], "a list of texts"),
        ("pair", ["a"], "a list of two texts"),
        ("places", [True], "a list of whole numbers"),
        ("places", {0: 1}, "a list of whole numbers"),
    ],
)
def test_values_that_do_not(field, value, expected):
    with pytest.raises(MismatchError) as caught:
        TYPES[field].convert(value)
    assert str(caught.value) == expected


def test_texts():
    assert (TYPES["count"].parse("-3"), TYPES["share"].parse("1e3"), TYPES["name"].parse("x")) == (-3, 1000.0, "x")
    for field, text in (("count", "3.0"), ("count", "9" * 5000), ("share", "warm"), ("places", "x")):
        with pytest.raises(MismatchError, match="number"):
            TYPES[field].parse(text)


def test_words_for_errors():
    names = {name: one.type_names for name, one in TYPES.items()}
    assert names["count"] == "int"
    assert names["name"] == "str or null"
    assert names["pair"] == "tuple or null"
    assert FieldType(str, is_tuple=True).expected == "a list of texts"
