"""The golden values of the MoE cases do not hang on the rounding of a router's score."""

from __future__ import annotations

import json

import pytest
import torch

from arguments import parse_arguments
from megatron_ext.models.load import load_model
from tests.functional_tests.cases import Case, find_cases
from tests.unit_tests.support.moe import model_margin

SAFE_MARGIN = 1e-5  # a score is right to 1e-6
MOE_CASES = [case for case in find_cases() if case.name.startswith("moe/")]


@pytest.mark.long  # golden values seldom change
@pytest.mark.parametrize("case", MOE_CASES, ids=lambda case: case.name)
def test_routers_do_not_waver(case: Case):
    settings = parse_arguments(case.flags)
    loaded = load_model(settings.source, settings.model_overrides, device=torch.device("cpu"))
    lines = (case.folder / settings.run.prompt_file).read_text(encoding="utf-8").splitlines()
    for line, entry in zip(lines, case.golden_values().entries.values(), strict=True):
        tokens = json.loads(line)["token_ids"] + entry["generated_tokens"]
        assert model_margin(loaded.model, tokens, loaded.config) > SAFE_MARGIN
