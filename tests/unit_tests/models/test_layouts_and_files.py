"""MR-1, MR-4: a tensor that does not fit is an error on every rank, whichever rank needs it."""

from __future__ import annotations

import dataclasses
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatron_ext.config import ParallelConfig, SourceConfig
from megatron_ext.config.differences import EMBEDDED_MODEL_DIR
from megatron_ext.errors import ConfigError
from megatron_ext.mcore import platform
from megatron_ext.mcore.checkpoint import checkpoint_files
from megatron_ext.models.huggingface.export import save_hf_checkpoint
from megatron_ext.models.load import load_model
from megatron_ext.models.megatron.dist_checkpoint import save_dist_checkpoint
from megatron_ext.models.weight_files import WeightFiles
from tests.unit_tests.models.megatron import megatron_lm
from tests.unit_tests.support.layouts import (
    CONFIGS,
    CPU,
    Part,
    assert_parts_of,
    held,
    load,
    logits,
    part_of,
    perturbed_model,
    sizes,
)
from tests.unit_tests.support.ranks import run_ranks

pytestmark = pytest.mark.worlds

KIND = "latent_experts"  # layers M*EME
LAYOUTS = {"TP 2": sizes(tp=2), "PP 2": sizes(pp=2), "EP 2": sizes(ep=2)}
ROUTER = "decoder.layers.4.mlp.router.weight"  # of the last stage


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("stored")
    save_dist_checkpoint(directory, perturbed_model(CONFIGS[KIND]), CONFIGS[KIND])
    return directory


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


@pytest.mark.parametrize("layout", LAYOUTS)
def test_names_are_those_of_all_ranks(layout, stored, tmp_path):
    """A tensor that one rank lacks, or that no rank asks for, is every rank's error."""
    without = spoiled(stored, tmp_path / "without", lambda tensors: tensors.pop(ROUTER))
    more = spoiled(stored, tmp_path / "more", lambda tensors: tensors.update({f"{ROUTER}.more": torch.ones(2)}))
    errors = run_ranks(errors_of, 2, [without, more], LAYOUTS[layout])
    assert errors[0] == errors[1]
    assert errors[0] == [
        f"{without} does not fit the model: it lacks {ROUTER}",
        f"{more} does not fit the model: it has unexpected {ROUTER}.more",
    ]


def misfits(cases: list[tuple[Path, ParallelConfig]]) -> list[str]:
    """Sizes that the world has, but the model cannot be spread by."""
    found = []
    for directory, parallel in cases:
        with pytest.raises(ConfigError) as error:
            load_model(SourceConfig(load=str(directory)), {}, parallel=parallel, device=CPU)
        found.append(str(error.value))
    return found


def test_a_model_that_cannot_be_spread_is_refused_before_it_is_built(stored, monkeypatch):
    """Here the second case would take ranks that are not there: nothing is built, no group is asked."""
    monkeypatch.setattr("megatron_ext.models.build._made", None)
    messages = misfits([(stored, sizes(tp=3)), (stored, sizes(ep=3)), (stored, sizes(pp=6))])
    for message, words in zip(messages, ("2 Mamba groups", "4 experts", "5 layers"), strict=True):
        assert message.startswith(words)
        assert message.partition("; ")[2], "a remedy"


def load_shipped(parallel: ParallelConfig) -> tuple[Part, list[str]]:
    """The embedded model, and what was logged."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("megatron_ext")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    platform.initialize(parallel)
    model = load_model(SourceConfig(), {}, parallel=parallel, device=CPU, reads_prediction=True).model
    return part_of(model, TOKENS), lines


TOKENS = list(range(1, 30))


@pytest.mark.parametrize("layout", ["TP 2", "PP 2"])
def test_the_embedded_model(layout):
    """Stages are said once, by the first rank."""
    results = run_ranks(load_shipped, 2, LAYOUTS[layout])
    model = load(EMBEDDED_MODEL_DIR, sizes(), is_hf=True)
    assert_parts_of(held(model), [part for part, _ in results])
    for part, _ in results:
        if part.logits is not None:
            torch.testing.assert_close(part.logits, logits(model, TOKENS), atol=1e-4, rtol=1e-4)
    said = ["2 pipeline stages: 4 layers (M-M*), 4 layers (M-M-)"] if layout == "PP 2" else []
    assert [lines for _, lines in results] == [said, []]


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


def load_gpt(directory: Path, parallel: ParallelConfig) -> Part:
    return part_of(load(directory, parallel), TOKENS)


@pytest.mark.parametrize("layout", ["TP 2", "PP 2"])
@pytest.mark.parametrize("stacked", [True, False], ids=["one tensor of all layers", "one tensor a layer"])
def test_checkpoints_of_megatron_lm(layout, stacked, tmp_path):
    """A stage may end within a layer of GPT, which is two of ours; the vocabulary is odd."""
    config = dataclasses.replace(megatron_lm.GPT, vocab_size=51, swiglu=True)
    gpt = megatron_lm.gpt_model(config).sharded_state_dict(metadata={"non_homogeneous_layers": not stacked})
    state = {"model": gpt, "args": megatron_lm.gpt_arguments(config)}
    checkpoint_files.write_state(state, tmp_path)
    model = load(tmp_path, sizes())
    parts = run_ranks(load_gpt, 2, tmp_path, LAYOUTS[layout])
    assert_parts_of(held(model), parts)
    for part in parts:
        if part.logits is not None:
            torch.testing.assert_close(part.logits, logits(model, TOKENS), atol=1e-4, rtol=1e-4)
