"""Models shared by all tests of this folder, one of each kind; no test changes them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING
from unittest import mock

import pytest

if TYPE_CHECKING:  # megatron-core is imported with the tests, when its warnings are filtered already
    from tests.unit_tests.support.caching import CachingDriver
    from tests.unit_tests.support.driver import Driver
    from tests.unit_tests.support.oracle import Oracle


@pytest.fixture(scope="session", autouse=True)
def parsers() -> Iterator[None]:
    """Build each parser of flags once; it takes 15 milliseconds, and parsing leaves it as it is."""
    from arguments import parser

    builders = {name: functools.cache(getattr(parser, name)) for name in ("build_parser", "build_server_parser")}
    with mock.patch.multiple(parser, **builders):
        yield


@functools.cache
def _oracles() -> Callable[[str], Oracle]:
    from tests.unit_tests.support.models import CONFIGS
    from tests.unit_tests.support.oracle import oracles_of

    return oracles_of(CONFIGS)


@pytest.fixture(scope="session")
def get_oracle() -> Callable[[str], Oracle]:
    """A function from "hybrid", "attention_only" or "attention_free" to the oracle, which holds the model."""
    return _oracles()


@pytest.fixture(scope="session")
def get_driver() -> Callable[..., Driver]:
    """A function that builds a driver around the model of a kind; keywords are those of `Driver`."""
    from tests.unit_tests.support.driver import Driver
    from tests.unit_tests.support.models import CONFIGS

    def build(kind: str = "hybrid", **kwargs: object) -> Driver:
        return Driver(_oracles()(kind).model, CONFIGS[kind], **kwargs)

    return build


@pytest.fixture(scope="session")
def get_caching_driver() -> Callable[..., CachingDriver]:
    """Factory of `CachingDriver`s, around a model of attention layers only unless another kind is named."""
    from tests.unit_tests.support.caching import CachingDriver
    from tests.unit_tests.support.models import CONFIGS

    def build(kind: str = "attention_only", **kwargs: object) -> CachingDriver:
        return CachingDriver(_oracles()(kind).model, CONFIGS[kind], **kwargs)

    return build


@pytest.fixture(scope="session")
def oracle() -> Oracle:
    """Oracle of the model of attention layers only."""
    return _oracles()("attention_only")
