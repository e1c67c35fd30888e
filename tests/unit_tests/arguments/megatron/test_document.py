"""MF-1: docs/megatron.md lists what the table has, under what becomes of it, with the reason."""

from __future__ import annotations

import re

from arguments import build_parser, build_server_parser
from arguments.megatron.flag_record import Effect
from arguments.megatron.flag_table import TABLE, records
from arguments.megatron.yaml_form import TOP_LEVEL
from megatron_ext.config.tokenizer import TOKENIZER_TYPES
from tests.unit_tests.support.source import ROOT

TEXT = (ROOT / "docs" / "megatron.md").read_text("utf-8")
SECTIONS = {
    Effect.ACCEPTED: "Accepted without effect",
    Effect.RESTRICTED: "Accepted with one value",
    Effect.CONDITIONAL: "Accepted with --fp8-as-16bit",
    Effect.REFUSED: "Refused",
}
FLAG = re.compile(r"`(--[a-z][\w-]*\*?)`")


def rows(effect: Effect) -> list[tuple[list[str], str]]:
    """Flags and text of each row of a section's table."""
    lines = TEXT.split(f"\n## {SECTIONS[effect]}\n")[1].split("\n## ")[0].splitlines()
    cells = [line.strip("| ").split(" | ", 1) for line in lines if line.startswith("| `")]
    return [(FLAG.findall(names), text) for names, text in cells]


def test_each_flag_stands_in_its_section_with_its_reason():
    for effect in Effect:
        reasons = {name: text for names, text in rows(effect) for name in names}
        expected = {flag.name: flag for flag in records() if flag.effect is effect}
        assert set(reasons) == set(expected)
        for name, flag in expected.items():
            assert flag.why in reasons[name], name
            for part in (*flag.allowed, *(text for pair in (*flag.refused, *flag.warned) for text in pair)):
                assert part in reasons[name], name


def test_flags_that_are_named_are_there():
    known = {
        option for build in (build_parser, build_server_parser) for a in build()._actions for option in a.option_strings
    }
    known |= {flag.name for group in TABLE for flag in group.flags} | {"--nproc-per-node"}  # torchrun's
    named = {name.split("=")[0] for name in re.findall(r"(?<![\w-])--[a-z][\w-]*\*?", TEXT)}
    assert sorted(named - known) == []


def test_keys_and_tokenizers_are_all_told():
    assert [name for name in (*TOP_LEVEL, *TOKENIZER_TYPES) if f"`{name}`" not in TEXT] == []
