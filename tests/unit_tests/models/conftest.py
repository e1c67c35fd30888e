"""Models that the tests of this folder share; each is made once."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

from megatron_ext.config import ModelConfig
from megatron_ext.models.build import build_model
from tests.unit_tests.models.huggingface import (
    dense_oracle,
    hybrid_oracle,
    llama_oracle,
    mamba_oracle,
    qwen3_next_oracle,
)
from tests.unit_tests.models.huggingface import nemotron_h_oracle as oracle

TINY = ModelConfig(
    hybrid_override_pattern="M*-",
    hidden_size=32,
    num_attention_heads=4,
    num_query_groups=2,
    mamba_state_dim=16,
    mamba_head_dim=8,
    mamba_num_groups=2,
    mamba_chunk_size=16,
    squared_relu=True,
    max_position_embeddings=64,
    vocab_size=50,
)


Oracles = Callable[[str], tuple[nn.Module, Path]]


def _make_each_once(family: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Oracles:
    made: dict[str, tuple[nn.Module, Path]] = {}
    shapes = {shape.name: shape for shape in family.SHAPES}

    def get(name: str) -> tuple[nn.Module, Path]:
        if name not in made:
            directory = tmp_path_factory.mktemp("hf")
            made[name] = family.make(shapes[name], directory), directory
        return made[name]

    return get


@pytest.fixture(scope="session")
def oracles(tmp_path_factory: pytest.TempPathFactory) -> Oracles:
    """A function from a NemotronH shape's name to transformers' model and the directory that it saved itself to."""
    return _make_each_once(oracle, tmp_path_factory)


@pytest.fixture(scope="session")
def llamas(tmp_path_factory: pytest.TempPathFactory) -> Oracles:
    """Oracles of Llama, each made once."""
    return _make_each_once(llama_oracle, tmp_path_factory)


@pytest.fixture(scope="session")
def denses(tmp_path_factory: pytest.TempPathFactory) -> Oracles:
    """Oracles of families with attention in every layer, and of Llama with biases, each made once."""
    return _make_each_once(dense_oracle, tmp_path_factory)


@pytest.fixture(scope="session")
def mambas(tmp_path_factory: pytest.TempPathFactory) -> Oracles:
    """Oracles of Mamba, FalconMamba and Jamba, each made once."""
    return _make_each_once(mamba_oracle, tmp_path_factory)


@pytest.fixture(scope="session")
def qwens(tmp_path_factory: pytest.TempPathFactory) -> Oracles:
    """Oracles of Qwen3-Next, each made once."""
    return _make_each_once(qwen3_next_oracle, tmp_path_factory)


@pytest.fixture(scope="session")
def hybrids(tmp_path_factory: pytest.TempPathFactory) -> Oracles:
    """Oracles of the families of hybrid_oracle.py, each made once."""
    return _make_each_once(hybrid_oracle, tmp_path_factory)


@pytest.fixture
def qwen_copy(qwens, tmp_path: Path) -> Path:
    """A saved Qwen3-Next checkpoint (shape "experts") that a test may spoil."""
    return shutil.copytree(qwens("experts")[1], tmp_path / "qwen")


@pytest.fixture
def hf_copy(oracles, tmp_path: Path) -> Path:
    """A saved NemotronH checkpoint (shape "mha") that a test may spoil."""
    return shutil.copytree(oracles("mha")[1], tmp_path / "hf")


@pytest.fixture
def llama_copy(llamas, tmp_path: Path) -> Path:
    """A saved Llama checkpoint (shape "mha") that a test may spoil."""
    return shutil.copytree(llamas("mha")[1], tmp_path / "llama")


@pytest.fixture(scope="session")
def tiny_config() -> ModelConfig:
    """The smallest hybrid with every kind of layer."""
    return TINY


@pytest.fixture(scope="session")
def tiny_model() -> nn.Module:
    """A model of `tiny_config`; not to be changed."""
    return build_model(TINY, dtype=torch.float32, device=torch.device("cpu"), seed=7)
