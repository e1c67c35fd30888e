"""MF-1: docs/megatron.md names flags that exist, and all tokenizers."""

from __future__ import annotations

import re

from arguments import build_parser, build_server_parser
from arguments.megatron.flag_table import TABLE
from megatron_ext.config.source import TOKENIZER_TYPES
from tests.unit_tests.support.source import ROOT

TEXT = (ROOT / "docs" / "megatron.md").read_text("utf-8")


def test_flags_that_are_named_are_there():
    known = {
        option for build in (build_parser, build_server_parser) for a in build()._actions for option in a.option_strings
    }
    known |= {flag.name for group in TABLE for flag in group.flags} | {"--nproc-per-node"}  # torchrun's
    named = {name.split("=")[0] for name in re.findall(r"(?<![\w-])--[a-z][\w-]*\*?", TEXT)}
    assert sorted(named - known) == []


def test_tokenizers_are_all_told():
    assert [name for name in TOKENIZER_TYPES if f"`{name}`" not in TEXT] == []
