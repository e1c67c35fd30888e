"""MR-6: an error is reported where it is seen: by no more ranks than needed, and with the rank that alone sees it."""

from __future__ import annotations

from pathlib import Path

import pytest

from arguments import parse_arguments, parse_server_arguments
from megatron_ext.errors import ConfigError, MachineError
from megatron_ext.parallel.parallel_context import ParallelContext
from megatron_ext.parallel.world import message_of_this_rank

RANKS = {
    "alone": {},
    "the first one": {"RANK": "0", "LOCAL_RANK": "0"},
    "the second one of its machine": {"RANK": "1", "LOCAL_RANK": "1"},
    "the first one of another machine": {"RANK": "8", "LOCAL_RANK": "0"},
    "one of another machine": {"RANK": "9", "LOCAL_RANK": "1"},
    "one of an unknown machine": {"RANK": "3"},
}


def test_the_first_rank_reports_an_error_of_all_ranks() -> None:
    said = {name: message_of_this_rank(ConfigError("no"), variables) for name, variables in RANKS.items()}
    assert said == dict.fromkeys(RANKS) | {"alone": "no", "the first one": "no"}


def test_the_first_rank_of_a_machine_reports_its_error() -> None:
    said = {name: message_of_this_rank(MachineError("no"), variables) for name, variables in RANKS.items()}
    assert said == {
        "alone": "no",
        "the first one": "no",
        "the second one of its machine": None,
        "the first one of another machine": "rank 8: no",
        "one of another machine": None,
        "one of an unknown machine": "rank 3: no",
    }


@pytest.mark.parametrize("content", [None, "no-such-flag: 1", "seed: warm", "["], ids=str)
def test_a_yaml_file_is_one_machines(content: str | None, tmp_path: Path) -> None:
    """Missing, or another one than elsewhere. What flags themselves say is seen by all."""
    path = tmp_path / "flags.yaml"
    if content is not None:
        path.write_text(content)
    for parse in (parse_arguments, parse_server_arguments):
        with pytest.raises(MachineError) as caught:
            parse(["--model-config", str(path)])
        assert str(path) in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        parse_arguments(["--temperature", "warm"])
    assert type(caught.value) is ConfigError


class GatheredContext(ParallelContext):
    """Context of rank 0 in a world whose other ranks have given fixed answers."""

    def __init__(self, *others: object) -> None:
        self._others = others

    def gather(self, one: object) -> list[object]:
        return [one, *self._others]


def refuse() -> None:
    raise ConfigError("too few heads")


@pytest.mark.parametrize(
    ("question", "others", "message"),
    [
        (refuse, (ConfigError("too few heads"), ConfigError("too few heads")), "too few heads"),
        (refuse, (1, 2), "rank 0: too few heads"),
        (refuse, (1, ConfigError("too few heads")), "rank 0: too few heads"),
        (refuse, (ConfigError("no such file"), 2), "rank 0: too few heads"),
        (int, (1, ConfigError("no such file")), "rank 2: no such file"),
    ],
)
def test_an_error_names_its_rank_unless_all_ranks_raise_it(question, others, message) -> None:
    with pytest.raises(ConfigError) as caught:
        GatheredContext(*others).ask_all(question)
    assert str(caught.value) == message
