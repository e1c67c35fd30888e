"""MR-4: a checkpoint loads at any layout, each rank its own part, wherever it was saved; ranks raise equal errors."""

from __future__ import annotations

import dataclasses
import functools
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from megatron.core import parallel_state
from torch import Tensor

from megatron_ext.config import ModelConfig, ParallelConfig, SourceConfig
from megatron_ext.errors import ConfigError
from megatron_ext.mcore import platform
from megatron_ext.mcore.checkpoint import checkpoint_files
from megatron_ext.models import new_directory
from megatron_ext.models.huggingface.export import save_hf_checkpoint
from megatron_ext.models.load import load_model, save_model
from megatron_ext.models.megatron.directory import read_header
from megatron_ext.models.megatron.dist_checkpoint import save_dist_checkpoint
from megatron_ext.models.size import matrix_parameter_count
from megatron_ext.models.weight_files import WeightFiles
from megatron_ext.parallel.layout import share_of
from tests.unit_tests.models.megatron import megatron_lm
from tests.unit_tests.support.layouts import (
    CONFIGS,
    CPU,
    Part,
    assert_parts_of,
    held,
    load,
    logits,
    matrices,
    part_of,
    perturbed_model,
    random_model,
    sizes,
)
from tests.unit_tests.support.ranks import run_ranks

pytestmark = pytest.mark.worlds

TOKENS = [int(token) for token in torch.randint(96, (40,), generator=torch.Generator().manual_seed(1))]
DENSE = ("mamba2", "odd vocabulary", "untied", "biases", "mamba1", "gated_delta_net")
WORDS, POSITIONS = "embedding.word_embeddings.weight", "embedding.position_embeddings.weight"
ROUTER = "decoder.layers.2.mlp.router.weight"
PREDICTION = ("prediction", "prediction_positions")
LAYOUTS = [
    (sizes(tp=2), (*DENSE, *PREDICTION, "latent_experts")),
    (sizes(pp=2), (*DENSE, *PREDICTION, "latent_experts")),
    (sizes(pp=2, first=1), ("mamba2",)),
    (sizes(pp=4), ("mamba2",)),  # stages of two, one, one and one layers
    (sizes(tp=2, pp=2), ("odd vocabulary", "prediction", "latent_experts")),
    (sizes(ep=2), ("experts", "latent_experts")),
    (sizes(tp=2, ep=2), ("latent_experts",)),
    (sizes(tp=2, ep=2, etp=1), ("latent_experts",)),
]


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory):
    """A model of one rank and where it is, by kind; each is made once."""

    @functools.cache
    def get(kind: str):
        model, directory = perturbed_model(CONFIGS[kind]).eval(), tmp_path_factory.mktemp("stored")
        save_dist_checkpoint(directory, model, CONFIGS[kind])
        return model, directory

    return get


def load_parts(directories: Sequence[Path], parallel: ParallelConfig, tokens: list[int] | None = None) -> list[Part]:
    return [part_of(load(directory, parallel), tokens) for directory in directories]


def load_and_measure(directories: Sequence[Path], parallel: ParallelConfig) -> list[Part]:
    """Load, and compare the size that was foretold."""
    models = [load(directory, parallel) for directory in directories]
    for directory, model in zip(directories, models, strict=True):
        config = read_header(directory)
        share = share_of(parallel, config, parallel_state.get_pipeline_model_parallel_rank())
        assert matrix_parameter_count(config, share) == matrices(model)
    return [part_of(model, TOKENS) for model in models]


@pytest.mark.parametrize(("parallel", "kinds"), LAYOUTS, ids=lambda value: getattr(value, "described", lambda: "")())
def test_each_rank_has_its_part(parallel, kinds, stored):
    """Each rank has its part; the ranks together compute the output of one."""
    directories = [stored(kind)[1] for kind in kinds]
    by_rank = run_ranks(load_and_measure, parallel.smallest_world, directories, parallel)
    for kind, parts in zip(kinds, zip(*by_rank, strict=True), strict=True):
        model = stored(kind)[0]
        assert_parts_of(held(model), parts)
        answers = [part.logits for part in parts if part.logits is not None]
        assert answers
        for answer in answers:
            torch.testing.assert_close(answer, logits(model, TOKENS), atol=2e-5, rtol=1e-4)


def random_parts(config: ModelConfig, parallel: ParallelConfig) -> Part:
    return part_of(random_model(config, parallel))


@pytest.mark.parametrize(
    ("kind", "parallel", "world", "expected"),
    [
        pytest.param("latent_experts", sizes(tp=2, ep=2), 4, {WORDS, ROUTER}, id="TP 2, EP 2"),
        pytest.param("latent_experts", sizes(pp=2), 4, {WORDS, ROUTER}, id="PP 2, two replicas"),
        pytest.param("prediction", sizes(pp=2), 2, {WORDS}, id="PP 2, prediction"),
        pytest.param("prediction_positions", sizes(pp=2), 2, {WORDS, POSITIONS}, id="PP 2, prediction and positions"),
    ],
)
def test_random_weights_agree(kind, parallel, world, expected):
    """Tensors that several ranks hold are equal: routers, norms, embeddings on the first and last stage."""
    seen: dict[tuple[str, str], Tensor] = {}
    shared = set()
    for part in run_ranks(random_parts, world, CONFIGS[kind], parallel):
        for name, (whole_name, boxes) in part.where.items():
            for box, local in boxes:
                own, key = part.tensors[name][local], (whole_name, str(box))
                shared |= {whole_name} if key in seen else set()
                assert torch.equal(seen.setdefault(key, own), own), key
    assert expected <= shared


def refused_spec(config: ModelConfig, parallel: ParallelConfig) -> str:
    with pytest.raises(ConfigError) as error:
        random_model(config, parallel)
    return str(error.value)


def test_a_foreign_stack_does_not_lose_layers():
    """megatron-core's cannot have stages of 2, 2, 1 and 1 layers: one line on every rank, where it would drop two."""
    config = dataclasses.replace(
        CONFIGS["mamba2"], hybrid_override_pattern="M*-M*-", spec=("tests.unit_tests.support.layouts", "foreign_spec")
    )
    errors = run_ranks(refused_spec, 4, config, sizes(pp=4))
    assert set(errors) == {errors[0]}
    assert "--spec cannot be used with pipeline stages of 2, 2, 1, 1 layers" in errors[0]


# Files

PAIRS = {"TP 2": sizes(tp=2), "PP 2": sizes(pp=2), "EP 2": sizes(ep=2)}
LAST_ROUTER = "decoder.layers.4.mlp.router.weight"


def errors_of(directories: list[Path], parallel: ParallelConfig) -> list[str]:
    """Errors of this rank, one for each directory; ranks may differ only in tensors that the others hold."""
    platform.initialize(parallel)
    found = []
    for directory in directories:
        with pytest.raises(ConfigError) as error:
            load_model(SourceConfig(load=str(directory)), {}, parallel=parallel, device=CPU)
        found.append(str(error.value))
        torch.distributed.barrier()
    return found


def spoiled(stored: Path, directory: Path, change: Callable[[dict], object]) -> Path:
    shutil.copytree(stored, directory)
    megatron_lm.edit_tensors(directory, change)
    return directory


@pytest.mark.parametrize("layout", PAIRS)
def test_names_are_those_of_all_ranks(layout, stored, tmp_path):
    """A tensor that one rank lacks, or that no rank asks for, is every rank's error."""
    _, directory = stored("latent_experts")  # layers M*EME
    without = spoiled(directory, tmp_path / "without", lambda tensors: tensors.pop(LAST_ROUTER))
    more = spoiled(directory, tmp_path / "more", lambda tensors: tensors.update({f"{LAST_ROUTER}.more": torch.ones(2)}))
    errors = run_ranks(errors_of, 2, [without, more], PAIRS[layout])
    assert errors[0] == errors[1]
    assert errors[0] == [
        f"{without} does not fit the model: it lacks {LAST_ROUTER}",
        f"{more} does not fit the model: it has unexpected {LAST_ROUTER}.more",
    ]


def test_a_model_that_cannot_be_spread_is_refused_before_it_is_built(stored, monkeypatch):
    """MR-1: nothing is built, and no group is asked: some of these ranks are not there."""
    monkeypatch.setattr("megatron_ext.models.build._made", None)
    source = SourceConfig(load=str(stored("latent_experts")[1]))
    for parallel, words in ((sizes(tp=3), "2 Mamba groups"), (sizes(ep=3), "4 experts"), (sizes(pp=6), "5 layers")):
        with pytest.raises(ConfigError, match=f"^{words}.*; .") as error:
            load_model(source, {}, parallel=parallel, device=CPU)
        assert "\n" not in str(error.value)


def numbers_read(directory: Path, parallel: ParallelConfig, is_hf: bool) -> int:
    """Count the values of weights that this rank reads."""
    read = []
    get, read_tensor = WeightFiles.get, checkpoint_files.read_tensor
    WeightFiles.get = lambda *args: read.append(get(*args)) or read[-1]
    checkpoint_files.read_tensor = lambda *args: read.append(read_tensor(*args)) or read[-1]
    load(directory, parallel, is_hf=is_hf)
    return sum(tensor.numel() for tensor in read)


@pytest.mark.parametrize("form", ["Hugging Face", "distributed"])
def test_each_rank_reads_its_part(form, tmp_path):
    """Ranks read whole rows of the distributed form, hence all of a matrix split along its columns."""
    config, is_hf = dataclasses.replace(CONFIGS["untied"], position_embedding_type="none"), form == "Hugging Face"
    model = perturbed_model(config)
    (save_hf_checkpoint if is_hf else save_dist_checkpoint)(tmp_path, model, config)
    whole = sum(tensor.numel() for tensor in held(model).values())
    for layout, parallel in (("TP 2", sizes(tp=2)), ("PP 2", sizes(pp=2))):
        for rank, count in enumerate(run_ranks(numbers_read, 2, tmp_path, parallel, is_hf)):
            assert 0.3 * whole < count < 0.7 * whole, (layout, rank)


@pytest.mark.parametrize("layout", ["TP 2", "PP 2"])
def test_checkpoints_of_megatron_lm(layout, tmp_path):
    """A stage may end within a layer of GPT, which is two of ours; the vocabulary is odd."""
    config = dataclasses.replace(megatron_lm.GPT, vocab_size=51, swiglu=True)
    gpt = megatron_lm.gpt_model(config).sharded_state_dict()
    state = {"model": gpt, "args": megatron_lm.gpt_arguments(config)}
    checkpoint_files.write_state(state, tmp_path)
    model = load(tmp_path, sizes())
    tokens = [token % 50 for token in TOKENS]
    parts = [parts[0] for parts in run_ranks(load_parts, 2, [tmp_path], PAIRS[layout], tokens)]
    assert_parts_of(held(model), parts)
    for part in parts:
        if part.logits is not None:
            torch.testing.assert_close(part.logits, logits(model, tokens), atol=1e-4, rtol=1e-4)


# Saved at one layout, loaded at another

SAVED_AT = {"1": sizes(), "TP 2": sizes(tp=2), "PP 2": sizes(pp=2), "EP 2": sizes(ep=2)}
KINDS = ("odd vocabulary", "prediction", "prediction_positions", "mamba1", "gated_delta_net", "latent_experts")


def kinds_at(layout: str) -> list[str]:
    return [kind for kind in KINDS if layout != "EP 2" or CONFIGS[kind].is_moe]


def save_again(sources: Sequence[Path], targets: Sequence[Path], parallel: ParallelConfig) -> None:
    platform.initialize(parallel)
    for source, target in zip(sources, targets, strict=True):
        loaded = load_model(SourceConfig(load=str(source), save=str(target)), {}, parallel=parallel, device=CPU)
        save_model(target, loaded)


@pytest.fixture(scope="module")
def saved(stored, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    """Models saved at every layout, by layout and kind."""
    places = {}
    for layout, parallel in SAVED_AT.items():
        folder = tmp_path_factory.mktemp("saved")
        targets = {kind: folder / "new folder" / kind for kind in kinds_at(layout)}
        sources = [stored(kind)[1] for kind in targets]
        run_ranks(save_again, parallel.smallest_world, sources, list(targets.values()), parallel)
        places |= {(layout, kind): target for kind, target in targets.items()}
        assert sorted(path.name for path in (folder / "new folder").iterdir()) == sorted(targets)
    return places


@pytest.mark.parametrize("layout", SAVED_AT)
def test_loaded_at(layout, saved, stored):
    parallel = SAVED_AT[layout]
    cases = {case: directory for case, directory in saved.items() if case[1] in kinds_at(layout)}
    by_rank = run_ranks(load_parts, parallel.smallest_world, list(cases.values()), parallel)
    for (_, kind), parts in zip(cases, zip(*by_rank, strict=True), strict=True):
        assert_parts_of(held(stored(kind)[0]), parts)


def test_replicas_write_it_once(saved, stored, tmp_path):
    """Two copies of the model on two ranks: what one of them has is written, by one of them."""
    run_ranks(save_again, 2, [stored("mamba1")[1]], [tmp_path / "saved"], sizes())
    written = sum(file.stat().st_size for file in (tmp_path / "saved").glob("*.distcp"))
    once = sum(file.stat().st_size for file in saved["1", "mamba1"].glob("*.distcp"))
    assert written < 1.2 * once
    assert_parts_of(held(stored("mamba1")[0]), [part_of(load(tmp_path / "saved", sizes()))])


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
    [("write", "No space left"), ("commit", "No space left"), ("share", "rank 1: --save .* is not visible")],
)
@pytest.mark.parametrize("is_there", [False, True], ids=["new", "over another"])
def test_a_failure_leaves_nothing(where, said, is_there, stored, saved, tmp_path):
    """Every rank raises one and the same error, and the previous files are unchanged."""
    target = tmp_path / "folder" / "target"
    if is_there:
        shutil.copytree(saved["PP 2", "mamba1"], target)
    before = contents(tmp_path)
    errors = run_ranks(fail_to_save, 2, stored("mamba2")[1], target, sizes(tp=2), where)
    assert errors[0] == errors[1]
    assert re.search(said, errors[0])
    assert contents(tmp_path) == before
    assert target.exists() == is_there
    assert [path.name for path in tmp_path.rglob(".*")] == ([".metadata"] if is_there else [])
