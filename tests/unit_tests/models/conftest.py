"""Models that the tests of this folder share; each is made once."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from megatron_ext.config import ModelConfig
from megatron_ext.models.build import build_model
from tests.unit_tests.models.huggingface.oracles import make

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


@pytest.fixture(scope="session")
def oracles(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[nn.Module, Path]]:
    """A function from a shape's name to transformers' model and the directory that it saved itself to."""

    @functools.cache
    def get(name: str) -> tuple[nn.Module, Path]:
        directory = tmp_path_factory.mktemp("hf")
        return make(name, directory), directory

    return get


@pytest.fixture
def hf_copy(oracles, tmp_path: Path) -> Path:
    """A saved NemotronH checkpoint that a test may spoil."""
    return shutil.copytree(oracles("nemotron")[1], tmp_path / "hf")


@pytest.fixture
def llama_copy(oracles, tmp_path: Path) -> Path:
    """A saved Llama checkpoint that a test may spoil."""
    return shutil.copytree(oracles("llama")[1], tmp_path / "llama")


@pytest.fixture(scope="session")
def tiny_config() -> ModelConfig:
    """The smallest hybrid with every kind of layer."""
    return TINY


@pytest.fixture(scope="session")
def tiny_model() -> nn.Module:
    """A model of `tiny_config`; not to be changed."""
    return build_model(TINY, dtype=torch.float32, device=torch.device("cpu"), seed=7)
