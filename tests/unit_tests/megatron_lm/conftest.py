from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parent / "checkout"
PROMPTS = [
    "0 14 49 33 3 23 16 1 44 22 53 34 26 38 38 50 22 21 2 41",
    "0 14 49 33 3 23 16 1 44 22 53 34 26 38 38 50 7 5",
]
# The scripts of Megatron-LM that this module plays are not in the tree.
collect_ignore = ["checkout", *([] if "MEGATRON_LM" in os.environ else ["test_real_scripts.py"])]


def is_foreign(name: str) -> bool:
    """Return whether a module comes from a checkout of Megatron-LM, the stand-in included."""
    path = getattr(sys.modules.get(name), "__file__", None)
    return (path is not None and str(CHECKOUT) in path) or name.startswith(("megatron.training", "megatron.inference"))


@pytest.fixture
def checkout(monkeypatch) -> Iterator[Path]:
    """The stand-in of a checkout, first on the path; what scripts import from it is forgotten at the end."""
    monkeypatch.syspath_prepend(CHECKOUT)  # newer wheels have `megatron.training`, too
    before = set(sys.modules)
    yield CHECKOUT
    training = sys.modules.get("megatron.training")
    if training is not None:
        training.forget()
    for name in set(sys.modules) - before:
        if is_foreign(name) or name.startswith("examples"):
            del sys.modules[name]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Function that writes the distributed checkpoint of a kind of model, once."""
    from megatron_ext.mcore.checkpoint.checkpoint_files import write_state
    from tests.unit_tests.support import megatron_models

    written: dict[str, Path] = {}

    def write(kind: str) -> Path:
        if kind not in written:
            written[kind] = tmp_path_factory.mktemp("checkpoint")
            iteration = written[kind] / "iter_0000100"
            iteration.mkdir()
            with megatron_models.stand_ins():
                model = megatron_models.build(kind)
                common = {"args": megatron_models.arguments(kind), "checkpoint_version": 3.0, "iteration": 100}
                write_state({**common, "model": model.sharded_state_dict()}, iteration)
            (written[kind] / "latest_checkpointed_iteration.txt").write_text("100", "utf-8")
        return written[kind]

    return write


@pytest.fixture
def run_script(checkout, checkpoints, tmp_path) -> Callable[..., dict]:
    """Function that runs a script of the stand-in and returns what it wrote."""
    from megatron_ext.megatron_lm.run import main
    from tests.unit_tests.support import megatron_models

    def run(script: str, kind: str = "llama", *flags: str, options: tuple[str, ...] = ()) -> dict:
        output = tmp_path / "results.json"
        arguments = ["--load", str(checkpoints(kind)), "--output-path", str(output), "--prompts", *PROMPTS]
        with megatron_models.stand_ins():
            assert main([*options, str(checkout / "examples/inference" / script), *arguments, *flags]) == 0
        return json.loads(output.read_text("utf-8"))

    return run
