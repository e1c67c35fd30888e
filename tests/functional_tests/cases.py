"""Functional test cases in Megatron-LM's layout.

A case is a folder `test_cases/<model>/<case>/` with the run's flags (`model_config.yaml`), its prompts,
`golden_values.json` as Megatron's checker reads it and `golden_values.run.json` with the counts of the run. The YAML
file has the form of Megatron's functional tests; `MODEL_ARGS` become the tool's command line. `METRICS` has names that
Megatron's checker knows, and names that it passes over: the ones in `checker.METRICS`, and `no_cache_effect` for a case
whose golden values need not change when the cache is off or has wrong contents. `WORLD_SIZE` in `ENV_VARS` is the
number of ranks, 1 if it is absent.

To add a case:

1. Write the folder's `model_config.yaml`, as in a case beside it, with a comment on what the case is for, and its
   prompts. `MODEL_ARGS` are flags of `tools/run_inference.py`, run inside the folder. With `WORLD_SIZE` add
   `no_cache_effect`, since wrong contents are planted in one process.
2. Choose the `METRICS`: `generated_tokens`, `generated_text` and `logprobs` are outputs that the cache must not change;
   `counts`, `events` and `system` record what the cache does; `times` checks order, not values. The golden values must
   see the cache: the case must skip something, its counts must differ with the cache off, and zeroed blocks and states
   must change what it compares. That needs `counts` and one of the first three; log-probs detect more than tokens. If
   the cache is not the subject, add `no_cache_effect`.
3. `make golden ARGS=<model>/<case>` writes both golden files. Read them: do they show what the case is for? Times never
   go into them.
4. `make test-all ARGS="tests/functional_tests -k <case>"`. Where `test_greedy_choices_are_clear` reports that the two
   best tokens are too close for another CPU to choose the same one, use another prompt.
5. If the purpose is one fact, add an assertion on the golden values to `test_caching_cases.py`.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from tests.forked import fork
from tests.functional_tests.checker import LOG_PROB_TOLERANCE, METRICS, OUTCOME, Results
from tests.unit_tests.support.megatron_cases import words_of

CASES = Path(__file__).resolve().parent / "test_cases"
CONFIG = "model_config.yaml"
NO_CACHE_EFFECT = "no_cache_effect"
_KEYS = {"ENV_VARS", "TEST_TYPE", "MODE", "MODEL_ARGS", "METRICS"}
STATE_ROUNDING = 5e-3  # of log-probs: a tenth of what 95 of 100 tokens may differ by with the cache on and off


@dataclass(frozen=True)
class Case:
    """Run whose results are compared.

    Attributes:
        name: `<model>/<case>`.
        model_args: Flags of `tools/run_inference.py` and their values; paths are relative to the case's folder.
        metrics: Names of the metrics that our checker compares.
        must_see_cache: True if tokens are skipped and the golden values differ without the cache or with wrong
            contents.
        ranks: Number of ranks that the tool is run on.

    Raises:
        ValueError: If a metric is unknown, the list is empty, or its metrics cannot see the cache.
    """

    name: str
    model_args: Mapping[str, object]
    metrics: tuple[str, ...]
    must_see_cache: bool = True
    ranks: int = 1

    def __post_init__(self) -> None:
        unknown = sorted(set(self.metrics) - set(METRICS))
        if unknown or not self.metrics:
            raise ValueError(
                f"{self.name}: metrics {unknown or 'missing'}; known are {', '.join((*METRICS, NO_CACHE_EFFECT))}"
            )
        if self.must_see_cache and not ("counts" in self.metrics and self.outcome):
            raise ValueError(
                f"{self.name} must see the cache: that takes the metric counts and one of {', '.join(OUTCOME)}; or add "
                f"{NO_CACHE_EFFECT}"
            )

    @property
    def tolerance(self) -> float:
        """Tolerance of log-probs. States in 16 bits round a sum up or down depending on the order of its terms."""
        dtypes = {"bf16", "fp16"} & set(map(str, self.model_args.values()))
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
    def flags(self) -> list[str]:
        """Arguments of `tools/run_inference.py`, run in the case's folder."""
        return words_of(self.model_args)

    @property
    def config(self) -> Path:
        """Path of its YAML file."""
        return self.folder / CONFIG

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

    def run(self, *flags: str) -> Results:
        """Run the tool in processes of its own, as `python tools/run_inference.py` does after its imports.

        Args:
            *flags: More flags than the case has; they override its own.

        Returns:
            Both files that it writes, with events.

        Raises:
            RuntimeError: If it does not end with exit code 0; has what it wrote on standard error.
        """
        with tempfile.TemporaryDirectory() as folder:
            errors = Path(folder) / "stderr"
            arguments = [*self.flags, *flags, *output_flags(Path(folder))]
            if self.ranks > 1:
                self._run_ranks(arguments)
                return read_results(Path(folder))
            process = fork(_run_tool, arguments, self.folder, errors)
            process.join()
            if process.exitcode != 0:
                raise RuntimeError(f"{self.name}: exit code {process.exitcode}: {errors.read_text(encoding='utf-8')}")
            return read_results(Path(folder))

    def _run_ranks(self, arguments: list[str]) -> None:
        from tests.unit_tests.support.ranks import run_world

        outcomes = run_world(_run_rank, self.ranks, arguments, self.folder)
        failed = [one.describe() for one in outcomes if one.exit_code != 0]
        if failed:
            raise RuntimeError("\n".join([f"{self.name}:", *failed]))


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
    from megatron_ext.commands.run import main

    sys.exit(main(arguments))


def _run_rank(arguments: list[str], folder: Path) -> None:
    """Run the tool in a rank's process, as torchrun does."""
    from torch import distributed

    from megatron_ext.commands.run import main

    os.environ |= {"RANK": str(distributed.get_rank()), "WORLD_SIZE": str(distributed.get_world_size())}
    os.chdir(folder)
    sys.exit(main(arguments))


def case_folders() -> list[Path]:
    """Every folder that is a case or should be one, by name."""
    return sorted(path for path in CASES.glob("*/*") if path.is_dir() and not path.name.startswith(("_", ".")))


def find_cases() -> list[Case]:
    """Every case, by name."""
    return [read_case(folder) for folder in case_folders()]


def read_case(folder: Path) -> Case:
    """Read a case's YAML file.

    Raises:
        OSError: If the file does not exist.
        ValueError: If the file is not a mapping with Megatron's keys, or one of them has another type; see also `Case`.
        yaml.YAMLError: If the file is not YAML.
    """
    name = folder.relative_to(CASES).as_posix()
    config = yaml.safe_load((folder / CONFIG).read_text(encoding="utf-8"))
    keys = set(config) if isinstance(config, dict) else set()
    if keys != _KEYS:
        raise ValueError(f"{name}: {CONFIG} has {sorted(keys, key=str)}, not {', '.join(sorted(_KEYS))}")
    variables, model_args, metrics = config["ENV_VARS"], config["MODEL_ARGS"], config["METRICS"]
    if not isinstance(variables, dict) or not isinstance(model_args, dict) or not isinstance(metrics, list):
        raise ValueError(f"{name}: ENV_VARS and MODEL_ARGS must be mappings and METRICS a list")
    ours = tuple(str(metric) for metric in metrics if metric != NO_CACHE_EFFECT)
    return Case(name, model_args, ours, NO_CACHE_EFFECT not in metrics, int(variables.get("WORLD_SIZE", 1)))
