"""Functional test cases: what they run, and how.

A case is a folder `test_cases/<model>/<case>/` with `model_config.yaml`, `golden_values.json`,
`golden_values.run.json` and the prompts. The YAML
file has the flags of one run as typed (`flags`), the metrics to compare (`metrics`, see `checker.METRICS`) and whether
the run must see the cache (`must_see_cache`, true unless said otherwise). Nothing here fails where a folder is
incomplete: that is the business of this folder's own tests.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import yaml

from tests.forked import fork
from tests.functional_tests.checker import LOG_PROB_TOLERANCE, METRICS, OUTCOME, Results

CASES = Path(__file__).resolve().parent / "test_cases"
STATE_ROUNDING = 5e-3  # of log-probs: a tenth of what 95 of 100 tokens may differ by with the cache on and off
UNREADABLE = (OSError, ValueError, yaml.YAMLError)  # what `read_case` raises


@dataclass(frozen=True)
class Case:
    """Run whose results are compared.

    Attributes:
        name: `<model>/<case>`.
        flags: Arguments of `tools/run_inference.py`; paths are relative to the case's folder.
        metrics: Names of the compared metrics.
        must_see_cache: True if tokens are skipped and the golden values differ without the cache or with wrong
            contents.

    Raises:
        ValueError: If a metric is unknown, the list is empty, or its metrics cannot see the cache.
    """

    name: str
    flags: tuple[str, ...]
    metrics: tuple[str, ...]
    must_see_cache: bool = True

    def __post_init__(self) -> None:
        unknown = sorted(set(self.metrics) - set(METRICS))
        if unknown or not self.metrics:
            raise ValueError(f"{self.name}: metrics {unknown or 'missing'}; known are {', '.join(METRICS)}")
        if self.must_see_cache and not ("counts" in self.metrics and self.outcome):
            raise ValueError(
                f"{self.name} must see the cache: that takes the metric counts and one of {', '.join(OUTCOME)}; or say "
                "must_see_cache: false"
            )

    @property
    def tolerance(self) -> float:
        """Tolerance of log-probs. States in 16 bits round a sum up or down depending on the order of its terms."""
        dtypes = {"bf16", "fp16"} & set(self.flags)
        return STATE_ROUNDING if dtypes else LOG_PROB_TOLERANCE

    @property
    def outcome(self) -> list[str]:
        """Names of the metrics that the cache must not change."""
        return [name for name in OUTCOME if name in self.metrics]

    @property
    def folder(self) -> Path:
        """Folder of the case's files."""
        return CASES / self.name

    @property
    def golden_path(self) -> Path:
        """Path of the requests' golden values, which may not exist yet."""
        return self.folder / "golden_values.json"

    @property
    def golden_run_path(self) -> Path:
        """Path of the golden counts of the run, which may not exist yet."""
        return self.folder / "golden_values.run.json"

    def golden_values(self) -> Results:
        """Golden values of the case.

        Raises:
            FileNotFoundError: If a file does not exist; the message names the command that makes it.
        """
        paths = self.golden_path, self.golden_run_path
        for path in paths:
            if not path.is_file():
                raise FileNotFoundError(f"{self.name} has no {path.name}; `{self.regenerate}` writes it")
        return Results(*(json.loads(path.read_text(encoding="utf-8")) for path in paths))

    @property
    def regenerate(self) -> str:
        """The command that writes its golden values."""
        return f"make golden ARGS={self.name}"

    def run(self) -> Results:
        """Run the tool in a process of its own, as `python tools/run_inference.py` does after its imports.

        Returns:
            Both files that it writes, with events.

        Raises:
            RuntimeError: If it does not end with exit code 0; has what it wrote on standard error.
        """
        with tempfile.TemporaryDirectory() as folder:
            errors = Path(folder) / "stderr"
            arguments = [*self.flags, *output_flags(Path(folder))]
            process = fork(_run_tool, arguments, self.folder, errors)
            process.join()
            if process.exitcode != 0:
                raise RuntimeError(f"{self.name}: exit code {process.exitcode}: {errors.read_text(encoding='utf-8')}")
            return read_results(Path(folder))


def output_flags(folder: Path) -> list[str]:
    """Flags that make a run write both files, with events, into a folder."""
    return ["--output-path", str(folder / "results.json"), "--output-request-events"]


def read_results(folder: Path) -> Results:
    """Read both files that a run with `output_flags` has written."""
    names = "results.json", "results.run.json"
    return Results(*(json.loads((folder / name).read_text(encoding="utf-8")) for name in names))


def _run_tool(arguments: list[str], folder: Path, errors: Path) -> None:
    """Run the tool in its process."""
    with errors.open("wb") as file:
        os.dup2(file.fileno(), sys.stderr.fileno())
    with Path(os.devnull).open("wb") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
    os.chdir(folder)
    from tools.run_inference import main

    sys.exit(main(arguments))


def case_folders() -> list[Path]:
    """Every folder that is a case or should be one, by name."""
    return sorted(path for path in CASES.glob("*/*") if path.is_dir() and not path.name.startswith(("_", ".")))


def find_cases() -> list[Case]:
    """Every case that can be read, by name; the others fail in `test_golden_values.test_the_case_can_be_read`."""
    cases = []
    for folder in case_folders():
        with contextlib.suppress(*UNREADABLE):
            cases.append(read_case(folder))
    return cases


def read_case(folder: Path) -> Case:
    """Read a case's YAML file.

    Raises:
        OSError: If the file does not exist.
        ValueError: If the file is not a mapping with `flags`, `metrics` and, if wanted, `must_see_cache`; see also
            `Case`.
        yaml.YAMLError: If the file is not YAML.
    """
    name = folder.relative_to(CASES).as_posix()
    config = yaml.safe_load((folder / "model_config.yaml").read_text(encoding="utf-8"))
    keys = set(config) if isinstance(config, dict) else set()
    if not {"flags", "metrics"} <= keys <= {"flags", "metrics", "must_see_cache"}:
        raise ValueError(
            f"{name}: model_config.yaml has {sorted(keys, key=str)}, not flags, metrics and, if wanted, must_see_cache"
        )
    flags, metrics, must_see = config["flags"], config["metrics"], config.get("must_see_cache", True)
    if not isinstance(flags, str) or not isinstance(metrics, list) or not isinstance(must_see, bool):
        raise ValueError(f"{name}: flags must be a string, metrics a list and must_see_cache true or false")
    return Case(name, tuple(shlex.split(flags)), tuple(str(metric) for metric in metrics), must_see)
