"""Checkpoints of four versions of megatron-core, written and read by their own code (as_megatron.py).

The wheels are fetched by hash (tools/bases.py). Without them these tests are skipped; test_megatron_lm.py reads the
same forms as small writers of the tests make them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatron_ext.config import ModelConfig, ParallelConfig, SourceConfig
from megatron_ext.errors import CheckpointError
from megatron_ext.mcore import platform
from megatron_ext.mcore.checkpoint.weight_shards import model_tensors, requested_state
from megatron_ext.mcore.layers.hybrid_model import HybridModel
from megatron_ext.models.build import build_model
from megatron_ext.models.load import load_model, save_model
from tests.unit_tests.models.megatron import as_megatron
from tests.unit_tests.models.megatron.as_megatron import EXPERTS, GPT_PATTERNS, MAMBA, PATTERNS, SIZES, VOCABULARY
from tests.unit_tests.support.layouts import CPU, Part, assert_parts_of, held, logits, part_of, sizes
from tests.unit_tests.support.ranks import run_ranks
from tools import bases

VERSIONS = ("0.16.1", "0.17.1", "0.18.2", "0.19.2")
# Norms have the keys of local specs in one layout, those of Transformer Engine's in the other.
SAVED_AT = {"TP 1 PP 1": ("--local-norms",), "TP 2 PP 2": ("--tp=2", "--pp=2")}
LOADED_AT = {"TP 2": sizes(tp=2), "PP 2": sizes(pp=2), "EP 2": sizes(ep=2), "TP 2 PP 2": sizes(tp=2, pp=2)}
KINDS = ("gpt", "gpt_moe", "hybrid", "hybrid_moe")
TOKENS = [int(token) for token in torch.randint(VOCABULARY, (40,), generator=torch.Generator().manual_seed(1))]
SCRIPT = Path(as_megatron.__file__)
DEADLINE = 300  # seconds, for a loaded machine

Saved = Callable[[str, str], Path]


def wheel(version: str) -> Path:
    """Folder of a version's packages; skips the test if the wheel cannot be fetched, and fails if it is another one."""
    try:
        return bases.fetch(version)
    except ValueError as error:
        if "DO NOT MATCH" in str(error):
            raise
        pytest.skip(f"checkpoints of megatron-core {version} are not tested, its wheel cannot be fetched: {error}")


def run(version: str, *options: object) -> None:
    """Run as_megatron.py with one version of megatron-core and no other."""
    command = [sys.executable, "-W", "ignore", SCRIPT, *options]
    packages = wheel(version)
    environment = os.environ | {"PYTHONPATH": str(packages), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        list(map(str, command)), env=environment, capture_output=True, text=True, timeout=DEADLINE, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert f"{packages / 'megatron/core/__init__.py'}:" in done.stdout, done.stdout


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Folder with a checkpoint of each kind, by version and layout; each is written once."""
    made: dict[tuple[str, str], Path] = {}

    def get(version: str, layout: str) -> Path:
        if (version, layout) not in made:
            folder = tmp_path_factory.mktemp("saved")
            digests = ("--digests",) if version >= "0.18" else ()
            run(version, "save", folder, *as_megatron.KINDS, *SAVED_AT[layout], *digests)
            made[version, layout] = folder
        return made[version, layout]

    return get


def config_of(kind: str) -> ModelConfig:
    """Configuration that a kind of as_megatron.py has."""
    pattern = (PATTERNS | GPT_PATTERNS)[kind]
    absent = {"add_bias_linear"} if "-" in pattern else {"add_bias_linear", "ffn_hidden_size"}
    fields = {name: value for name, value in SIZES.items() if name not in absent}
    if "moe" in kind:
        fields |= {name: value for name, value in EXPERTS.items() if name != "num_moe_experts"}
        fields["num_experts"] = EXPERTS["num_moe_experts"]
    if kind in PATTERNS:
        fields |= MAMBA
    return ModelConfig(
        hybrid_override_pattern=pattern,
        position_embedding_type="none" if kind in PATTERNS else "rope",
        swiglu=True,
        untie_embeddings_and_output_weights=True,
        max_position_embeddings=4096,
        vocab_size=VOCABULARY,
        **fields,
    )


@pytest.fixture(scope="module")
def wholes() -> dict[str, HybridModel]:
    """Model of each kind that never was in a file: what every checkpoint has."""
    models = {}
    for kind in KINDS:
        model = build_model(config_of(kind), device=CPU)
        as_megatron.fill(requested_state(model), of_gpt=kind in GPT_PATTERNS)
        with torch.no_grad():
            for name, tensor in model_tensors(model).items():
                if not name.endswith("expert_bias"):  # which stays in fp32
                    tensor.copy_(tensor.bfloat16())
        models[kind] = model
    return models


def load(directory: Path, parallel: ParallelConfig | None = None) -> HybridModel:
    source = SourceConfig(load=str(directory), use_checkpoint_args=True)
    return load_model(source, {}, parallel=parallel, device=CPU).model


def mark_of(version: str, layout: str) -> pytest.MarkDecorator:
    """`.ci/run` runs one of them, `make test-versions` the others."""
    is_first = (version, layout) == (VERSIONS[-1], next(iter(SAVED_AT)))
    return pytest.mark.long if is_first else pytest.mark.versions


@pytest.mark.parametrize(
    ("version", "layout"),
    [pytest.param(version, layout, marks=mark_of(version, layout)) for version in VERSIONS for layout in SAVED_AT],
)
def test_a_checkpoint_has_equal_tokens(version: str, layout: str, saved: Saved, wholes: dict) -> None:
    """MR-1: models with training state beside them; every tensor is as it was stored, and so is the configuration."""
    for kind in KINDS:
        source = SourceConfig(load=str(saved(version, layout) / kind), use_checkpoint_args=True)
        loaded = load_model(source, {}, device=CPU)
        assert loaded.config == config_of(kind)
        assert_parts_of(held(wholes[kind]), [part_of(loaded.model)])
        assert torch.equal(logits(loaded.model, TOKENS), logits(wholes[kind], TOKENS)), kind


def load_all(directories: list[Path], parallel: ParallelConfig) -> list[Part]:
    platform.initialize(parallel)
    return [part_of(load(directory, parallel), TOKENS) for directory in directories]


@pytest.mark.versions
@pytest.mark.worlds
@pytest.mark.parametrize("layout", LOADED_AT)
def test_any_layout_reads_any_other(layout: str, saved: Saved, wholes: dict) -> None:
    """MR-4: 0.16.1's and 0.19.2's, the oldest and the newest form of the files."""
    parallel = LOADED_AT[layout]
    cases = [
        (kind, saved(version, written) / kind)
        for version in (VERSIONS[0], VERSIONS[-1])
        for written in SAVED_AT
        for kind in KINDS
        if config_of(kind).is_moe or parallel.expert_model_parallel_size == 1
    ]
    directories = [directory for _, directory in cases]
    by_rank = run_ranks(load_all, parallel.smallest_world, directories, parallel, deadline=DEADLINE)
    for (kind, _), parts in zip(cases, zip(*by_rank, strict=True), strict=True):
        assert_parts_of(held(wholes[kind]), parts)
        expected = logits(wholes[kind], TOKENS)
        for part in parts:
            if part.logits is not None:
                torch.testing.assert_close(part.logits, expected, atol=1e-4, rtol=1e-4)
                assert torch.equal(part.logits.argmax(-1), expected.argmax(-1))


@pytest.mark.versions
@pytest.mark.parametrize("version", ["0.18.2", "0.19.2"])
def test_a_flipped_byte(version: str, saved: Saved, tmp_path: Path) -> None:
    """The manifest of upstream's own `verify_integrity` is verified."""
    source = saved(version, "TP 2 PP 2") / "hybrid" / as_megatron.ITERATION
    for path in source.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    assert "integrity.json" in {path.name for path in source.iterdir()}
    load(tmp_path)
    weights = tmp_path / "__3_0.distcp"
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"__3_0\.distcp is damaged: its SHA-256") as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.versions
@pytest.mark.parametrize("version", ["0.16.1", "0.19.2"])
def test_upstream_reads_what_save_writes(version: str, wholes: dict, tmp_path: Path) -> None:
    """MR-4: no key is missing or left over, for Megatron's hybrids of the same layers, on one rank and on four."""
    for kind, model in wholes.items():
        loaded = load_model(SourceConfig(save=str(tmp_path / kind)), config_of(kind).to_dict(), device=CPU)
        with torch.no_grad():
            for name, tensor in model_tensors(loaded.model).items():
                tensor.copy_(model_tensors(model)[name])
        save_model(tmp_path / kind, loaded)
    run(version, "load", tmp_path, *KINDS)
    run(version, "load", tmp_path, *KINDS, "--tp=2", "--pp=2")
