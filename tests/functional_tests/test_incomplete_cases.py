"""A folder that is no good case yet: it fails its own tests, in words, and the collection of all others holds."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.functional_tests import cases
from tests.functional_tests.cases import read_case

HERE = Path(__file__).parent
MODULES = sorted(path for path in HERE.glob("test_*.py") if path.name != Path(__file__).name)
START = "ENV_VARS: {}\nTEST_TYPE: frozen-start\nMODE: inference\n"
GOOD = START + "MODEL_ARGS: {--prompts: 1}\nMETRICS: [generated_tokens, counts]\n"


@pytest.fixture
def add_case(tmp_path, monkeypatch) -> Callable[..., Path]:
    """A function: a folder among those of all cases, with this YAML file."""
    for model in cases.CASES.iterdir():
        (tmp_path / model.name).mkdir()
        for folder in model.iterdir():
            (tmp_path / model.name / folder.name).symlink_to(folder, target_is_directory=True)
    monkeypatch.setattr(cases, "CASES", tmp_path)

    def add(yaml: str | None) -> Path:
        folder = tmp_path / "hybrid" / "new"
        folder.mkdir()
        if yaml is not None:
            (folder / "model_config.yaml").write_text(yaml, encoding="utf-8")
        return folder

    return add


def collect(module: Path) -> dict[str, Any]:
    """Import the module as pytest would collect it and return its names."""
    return runpy.run_path(str(module))


@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.stem)
@pytest.mark.parametrize("yaml", [GOOD, "METRICS: ["], ids=["no golden values", "no YAML"])
def test_the_others_are_collected(add_case, module: Path, yaml: str | None):
    add_case(yaml)
    collect(module)


def test_without_golden_values_it_fails_with_the_command_that_makes_them(add_case):
    case = read_case(add_case(GOOD))
    modules = [collect(HERE / f"{name}.py") for name in ("test_golden_values", "test_caching_cases")]
    assert [case in module["CACHING"] for module in modules[1:]] == [True]
    assert case in modules[0]["CASES"]
    for test in (modules[0]["test_fresh_run_equals_golden_values"], modules[1]["test_something_was_skipped"]):
        with pytest.raises(
            FileNotFoundError, match=r"^hybrid/new has no golden_values.json; `make golden ARGS=hybrid/new"
        ):
            test(case)


@pytest.mark.parametrize(
    ("yaml", "words"),
    [
        (None, "model_config.yaml"),
        ("METRICS: [", "expected"),
        ("- 1", "has \\[\\], not ENV_VARS, METRICS, MODE, MODEL_ARGS, TEST_TYPE"),
        (START + "MODEL_ARGS: {}", "'MODE', 'MODEL_ARGS', 'TEST_TYPE'\\], not ENV_VARS, METRICS"),
        (GOOD + "METRIC: x", "'METRIC', 'METRICS'"),
        (GOOD + "METRICS: counts", "METRICS a list"),
        (GOOD + "MODEL_ARGS: --x", "MODEL_ARGS must be mappings"),
        (GOOD + "METRICS: [speed]", "\\['speed'\\]; known are generated_tokens"),
        (GOOD + "METRICS: []", "metrics missing"),
        (GOOD + "METRICS: [no_cache_effect]", "metrics missing"),
        (GOOD + "METRICS: [generated_tokens]", "takes the metric counts"),
        (GOOD + "METRICS: [counts, events]", "one of generated_tokens, generated_text, logprobs"),
    ],
)
def test_mistakes_are_named(add_case, yaml: str | None, words: str):
    folder = add_case(yaml)
    with pytest.raises(cases.UNREADABLE, match=words):
        read_case(folder)
    assert folder in cases.case_folders()
    assert folder.name not in {case.folder.name for case in cases.find_cases()}


def test_a_case_chooses_the_compared_fields(add_case):
    """A case may omit log-probs, and a case that need not see the cache may compare any metrics."""
    folder = add_case(GOOD)
    assert read_case(folder).must_see_cache
    assert read_case(folder).outcome == ["generated_tokens"]
    (folder / "model_config.yaml").write_text(GOOD + "METRICS: [events, no_cache_effect]\n")
    assert not read_case(folder).must_see_cache
    assert read_case(folder).outcome == []
