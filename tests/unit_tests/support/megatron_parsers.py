"""Parsers with the flags of Megatron-LM's that are also the engine's or in the table of Megatron's flags.

`megatron_flags.jsonl` has their names, kinds, defaults and attributes, those of its inference scripts included; `only`
is the version that alone has a flag.
"""

from __future__ import annotations

import argparse
import ast
import json
from collections.abc import Callable
from pathlib import Path

VERSIONS = ("0.16.1", "0.19.2")
FLAGS = [json.loads(line) for line in Path(__file__).with_name("megatron_flags.jsonl").read_text("utf-8").splitlines()]


def _layers(text: str) -> object:
    """The number or list that Megatron-LM makes of layers: `([0]*1+[1]*3)` is [0, 1, 1, 1]."""
    if text.isdigit():
        return int(text)
    parts = (part.split("*") for part in text.strip("()").split("+"))
    return [item for items, count in parts for item in ast.literal_eval(items) * int(count)]


def _pair(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


TYPES: dict[str, Callable[[str], object]] = {"int": int, "float": float, "str": str, "layers": _layers, "pair": _pair}


def megatron_parser(version: str) -> argparse.ArgumentParser:
    """A parser with the flags of a version, which does not know the engine's."""
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    for one in FLAGS:
        if one.get("only", version) == version:
            _add(parser, one)
    return parser


def _add(parser: argparse.ArgumentParser, one: dict) -> None:
    attribute = one.get("attribute") or one["flag"].lstrip("-").replace("-", "_")
    if one["kind"] in ("true", "false"):
        is_true = one["kind"] == "true"
        parser.add_argument(
            one["flag"], dest=attribute, action="store_const", const=is_true, default=one.get("default", not is_true)
        )
    elif one["kind"] == "optional":
        default = one.get("default", False)
        parser.add_argument(one["flag"], dest=attribute, action=argparse.BooleanOptionalAction, default=default)
    else:
        values = {name: one.get(name) for name in ("default", "nargs", "choices")}
        parser.add_argument(one["flag"], dest=attribute, type=TYPES[one["kind"]], **values)
