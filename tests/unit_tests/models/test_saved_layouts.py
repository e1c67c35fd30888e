"""MR-4: a model saved at one layout loads bitwise at every other; a failed save leaves no files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from megatron_ext.config import ParallelConfig, SourceConfig
from megatron_ext.errors import ConfigError
from megatron_ext.mcore import platform
from megatron_ext.models import new_directory
from megatron_ext.models.load import load_model, save_model
from megatron_ext.models.megatron.dist_checkpoint import save_dist_checkpoint
from tests.unit_tests.support.layouts import (
    CONFIGS,
    CPU,
    Part,
    assert_parts_of,
    held,
    load,
    part_of,
    perturbed_model,
    sizes,
)
from tests.unit_tests.support.ranks import run_ranks

pytestmark = pytest.mark.worlds

LAYOUTS = {"1": sizes(), "TP 2": sizes(tp=2), "PP 2": sizes(pp=2), "EP 2": sizes(ep=2)}
KINDS = (
    "mamba2",
    "odd vocabulary",
    "untied",
    "prediction",
    "prediction_positions",
    "mamba1",
    "gated_delta_net",
    "latent_experts",
)


def kinds_at(layout: str) -> list[str]:
    return [kind for kind in KINDS if layout != "EP 2" or CONFIGS[kind].is_moe]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[dict, Path]]:
    """Tensors of a model of one rank, and where it is, by kind."""
    made = {}
    for kind in KINDS:
        model, directory = perturbed_model(CONFIGS[kind]), tmp_path_factory.mktemp(kind)
        save_dist_checkpoint(directory, model, CONFIGS[kind])
        made[kind] = (held(model), directory)
    return made


def save_again(sources: Sequence[Path], targets: Sequence[Path], parallel: ParallelConfig) -> None:
    platform.initialize(parallel)
    for source, target in zip(sources, targets, strict=True):
        loaded = load_model(SourceConfig(load=str(source), save=str(target)), {}, parallel=parallel, device=CPU)
        save_model(target, loaded)


@pytest.fixture(scope="module")
def saved(whole, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    """Models saved at every layout, by layout and kind."""
    places = {}
    for layout, parallel in LAYOUTS.items():
        folder = tmp_path_factory.mktemp("saved")
        targets = {kind: folder / "new folder" / kind for kind in kinds_at(layout)}
        sources = [whole[kind][1] for kind in targets]
        run_ranks(save_again, parallel.smallest_world, sources, list(targets.values()), parallel)
        places |= {(layout, kind): target for kind, target in targets.items()}
        assert sorted(path.name for path in (folder / "new folder").iterdir()) == sorted(targets)
    return places


def load_all(directories: Sequence[Path], parallel: ParallelConfig) -> list[Part]:
    return [part_of(load(directory, parallel)) for directory in directories]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_loaded_at(layout, saved, whole):
    parallel = LAYOUTS[layout]
    cases = {case: directory for case, directory in saved.items() if case[1] in kinds_at(layout)}
    by_rank = run_ranks(load_all, parallel.smallest_world, list(cases.values()), parallel)
    for (_, kind), parts in zip(cases, zip(*by_rank, strict=True), strict=True):
        assert_parts_of(whole[kind][0], parts)


def test_ranks_wrote_files_of_their_own(saved):
    """Each rank writes its parts at one layout; replicas write nothing twice."""
    shards = {layout: sorted(saved[layout, "mamba2"].glob("*.distcp")) for layout in ("1", "TP 2")}
    assert [len(files) for files in shards.values()] == [1, 2]
    total = {layout: sum(file.stat().st_size for file in files) for layout, files in shards.items()}
    assert total["TP 2"] < 1.5 * total["1"]


def test_replicas_write_it_once(saved, whole, tmp_path):
    """Two copies of the model on two ranks: what one of them has is written, by one of them."""
    run_ranks(save_again, 2, [whole["mamba2"][1]], [tmp_path / "saved"], sizes())
    written = sum(file.stat().st_size for file in (tmp_path / "saved").glob("*.distcp"))
    once = sum(file.stat().st_size for file in saved["1", "mamba2"].glob("*.distcp"))
    assert written < 1.2 * once
    assert_parts_of(whole["mamba2"][0], [part_of(load(tmp_path / "saved", sizes()))])


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def fail_to_save(source: Path, target: Path, parallel: ParallelConfig, where: str) -> str:
    """Error that this rank raises if saving fails on one rank."""
    platform.initialize(parallel)
    loaded = load_model(SourceConfig(load=str(source)), {}, parallel=parallel, device=CPU)

    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    if where == "write" and torch.distributed.get_rank() == 1:
        torch.distributed.checkpoint.filesystem._write_item = fail
    elif where == "commit":
        new_directory._replace = fail
    elif where == "share" and torch.distributed.get_rank() == 1:
        Path.is_dir = lambda _: False
    with pytest.raises(ConfigError) as error:
        save_model(target, loaded)
    return str(error.value)


@pytest.mark.parametrize(
    ("where", "said"),
    [("write", "No space left"), ("commit", "No space left"), ("share", "is not visible to rank 1")],
)
@pytest.mark.parametrize("is_there", [False, True], ids=["new", "over another"])
def test_a_failure_leaves_nothing(where, said, is_there, whole, saved, tmp_path):
    """Every rank raises one and the same error, and the previous files are unchanged."""
    target = tmp_path / "folder" / "target"
    if is_there:
        target.parent.mkdir()
        os.rename(_copy(saved["PP 2", "mamba1"], tmp_path / "copy"), target)
    before = contents(tmp_path)
    errors = run_ranks(fail_to_save, 2, whole["mamba2"][1], target, sizes(tp=2), where)
    assert errors[0] == errors[1]
    assert said in errors[0]
    assert contents(tmp_path) == before
    assert target.exists() == is_there
    assert [path.name for path in tmp_path.rglob(".*")] == ([".metadata"] if is_there else [])


def _copy(source: Path, target: Path) -> Path:
    target.mkdir()
    for path in source.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    return target


def refuse(source: Path, target: Path, parallel: ParallelConfig) -> str:
    platform.initialize(parallel)
    with pytest.raises(ConfigError) as error:
        load_model(SourceConfig(load=str(source), save=str(target)), {}, parallel=parallel, device=CPU)
    return str(error.value)


def test_a_place_that_holds_something_else_is_refused_on_every_rank(whole, tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    errors = run_ranks(refuse, 2, whole["mamba2"][1], tmp_path, sizes(pp=2))
    assert errors[0] == errors[1] == f"--save {tmp_path} is not overwritten, it holds mine.txt; give a new or empty " \
        "directory"  # fmt: skip
