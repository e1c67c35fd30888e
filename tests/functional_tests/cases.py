"""Functional test cases: what they run, and how.

A case is a folder `test_cases/<model>/<case>/` with `model_config.yaml`, `golden_values.json` and the prompts. The YAML
file has the flags of one run as typed (`flags`) and the metrics to compare (`metrics`, see `checker.METRICS`).
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
CASES = Path(__file__).resolve().parent / "test_cases"


@dataclass(frozen=True)
class Case:
    """One run to compare.

    Attributes:
        name: `<model>/<case>`.
        flags: Arguments of `tools/run_inference.py`; paths are relative to the case's folder.
        metrics: Names of what to compare.
    """

    name: str
    flags: tuple[str, ...]
    metrics: tuple[str, ...]

    @property
    def folder(self) -> Path:
        """Where the case's files are."""
        return CASES / self.name

    @property
    def golden_path(self) -> Path:
        """The golden values, which may not exist yet."""
        return self.folder / "golden_values.json"

    def golden_values(self) -> dict[str, Any]:
        """The golden values."""
        return json.loads(self.golden_path.read_text(encoding="utf-8"))

    def run(self) -> dict[str, Any]:
        """Run the tool in a process of its own.

        Returns:
            The JSON that it writes, with events.

        Raises:
            RuntimeError: If it does not end with exit code 0; has what it wrote on standard error.
        """
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder) / "results.json"
            command = [sys.executable, str(ROOT / "tools" / "run_inference.py"), *self.flags]
            done = subprocess.run(
                [*command, "--output-path", str(output), "--output-request-events"],
                cwd=self.folder,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode != 0:
                raise RuntimeError(f"{self.name}: exit code {done.returncode}: {done.stderr}")
            return json.loads(output.read_text(encoding="utf-8"))


def find_cases() -> list[Case]:
    """Every case there is, by name."""
    return [read_case(path.parent) for path in sorted(CASES.glob("*/*/model_config.yaml"))]


def read_case(folder: Path) -> Case:
    """Read a case's YAML file; any key but `flags` and `metrics` is an error."""
    config = yaml.safe_load((folder / "model_config.yaml").read_text(encoding="utf-8"))
    return Case(
        name=folder.relative_to(CASES).as_posix(),
        flags=tuple(shlex.split(config.pop("flags"))),
        metrics=tuple(config.pop("metrics")),
        **config,
    )
