"""Which backend of an operator runs."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil

import pytest
import torch

from megatron_ext import ops
from megatron_ext.ops.backend_selection import OPERATORS
from megatron_ext.ops.backends import Backends, FunctionBackend, NoKernelError, Operator
from megatron_ext.ops.linear import LINEAR
from megatron_ext.ops.varlen import pack_chunks


@dataclasses.dataclass(frozen=True)
class Named:
    """Backend that computes nothing."""

    name: str
    takes: object = lambda x: True


FAST = Named("fast", lambda x: x.is_meta)
PLAIN = Named("plain")
ON_CPU, ON_META = torch.empty(1), torch.empty(1, device="meta")


def test_one_can_be_forced_for_a_while() -> None:
    backends = Backends("an operator", FAST, PLAIN)
    with backends.forced("plain"):
        assert backends.choose(ON_META) is PLAIN
        with backends.forced("fast"):
            assert backends.choose(ON_CPU) is FAST
        assert backends.choose(ON_META) is PLAIN
    assert backends.choose(ON_META) is FAST


def test_an_unknown_one_is_refused_by_name() -> None:
    forced = Backends("an operator", FAST, PLAIN).forced("triton")
    with pytest.raises(ValueError, match="an operator has no backend 'triton' here; available are fast, plain"), forced:
        pass


def test_a_function_is_its_own_reference() -> None:
    """The main input is the first tensor; what a backend lacks or refuses the function itself computes."""

    def doubled(x: torch.Tensor, factor: float) -> tuple[str, float]:
        if factor > 2:
            raise NoKernelError("no kernel multiplies by so much")
        return "fast", factor

    operator = Operator("an operator", FunctionBackend("fast", lambda x: x.is_meta, {"scaled": doubled}.get))

    @operator
    def scaled(x: torch.Tensor, factor: float) -> tuple[str, float]:
        return "plain", factor

    @operator
    def other(pair: tuple[torch.Tensor, torch.Tensor]) -> str:
        return operator.choose(pair[0]).name

    assert operator.names == ("fast", "reference")
    assert [scaled(x, factor=2.0) for x in (ON_META, ON_CPU)] == [("fast", 2.0), ("plain", 2.0)]
    assert scaled(ON_META, 3.0) == ("plain", 3.0)
    assert [other((x, x)) for x in (ON_META, ON_CPU)] == ["fast", "reference"]


def test_every_operator_is_in_the_table_of_the_start() -> None:
    """CU-3: an operator that is left out of the list runs on a backend that no line names."""
    packages = [importlib.import_module(f"{ops.__name__}.{one.name}") for one in pkgutil.iter_modules(ops.__path__)]
    values = [value for package in packages for value in vars(package).values()]
    found = {
        id(one): one for one in (getattr(value, "backends", value) for value in values) if isinstance(one, Backends)
    }
    assert {one.operator for one in found.values()} == {one.operator for one in (*OPERATORS, LINEAR)}


def test_data_of_a_backend_is_prepared_once() -> None:
    """A copy of the facts, on another device say, prepares its own."""
    made: list[int] = []

    def prepare(sequences: object) -> int:
        made.append(id(sequences))
        return len(made)

    facts = pack_chunks([[3], [1]], "cpu").sequences
    assert [facts.prepared(prepare), facts.prepared(prepare)] == [1, 1]
    assert dataclasses.replace(facts).prepared(prepare) == 2
