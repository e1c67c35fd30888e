"""Families of oracles: shapes by fixture, the prompts that compare them, and the measure of their differences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch
from torch import nn

from megatron_ext.config import SourceConfig
from megatron_ext.models.load import LoadedModel, load_model
from tests.unit_tests.models.huggingface import (
    dense_oracle,
    hybrid_oracle,
    llama_oracle,
    mamba_oracle,
    qwen3_next_oracle,
)
from tests.unit_tests.models.huggingface import nemotron_h_oracle as oracle
from tests.unit_tests.support.driver import Driver

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Oracles:
    """Oracles of one fixture.

    Attributes:
        module: Module with the shapes.
        lengths: Lengths of compared prompts, in tokens.
    """

    module: ModuleType
    lengths: tuple[int, ...] = (1, 3, 65, 300)

    @property
    def names(self) -> list[str]:
        """Names of the shapes."""
        return [shape.name for shape in self.module.SHAPES]


FAMILIES = {
    "llamas": Oracles(llama_oracle),
    "oracles": Oracles(oracle, (1, 3, 65, 129)),
    "qwens": Oracles(qwen3_next_oracle),
    "mambas": Oracles(mamba_oracle, (1, 3, 65, 300)),
    "hybrids": Oracles(hybrid_oracle, (1, 3, 65, 130)),
    "denses": Oracles(dense_oracle, (1, 65, 300)),
}
EVERY_SHAPE = [(fixture, name) for fixture, family in FAMILIES.items() for name in family.names]


def load_hf(directory: Path, overrides: Mapping[str, object] | None = None, **source: object) -> LoadedModel:
    """Load a folder with overrides, which may differ from its configuration in any way."""
    allowed = tuple(name.replace("_", "-") for name in overrides or ())
    config = SourceConfig(load_hf=str(directory), override_checkpoint_args=allowed, **source)
    return load_model(config, overrides or {}, device=CPU)


def excess(ours: nn.Module, theirs: nn.Module, length: int = 129) -> float:
    """Largest error of a prompt's logits in units of the tolerance: at most 1 is equal."""
    tokens = oracle.prompt(length, seed=length)
    return oracle.largest_excess(oracle.our_logits(ours, tokens), oracle.their_logits(theirs, tokens))


def engine_excess(driver: Driver, request_id: int, theirs: nn.Module) -> float:
    """Largest error of all generated tokens' logits in units of 1e-4 (plus 1e-4 of the value); at most 1 is equal."""
    record = driver.records[request_id]
    prompt, generated = list(record.prompt_tokens), list(record.generated_tokens)
    reference = oracle.their_logits(theirs, prompt + generated)[len(prompt) - 1 : -1]
    got = torch.stack([driver.seen[request_id].logits[len(prompt) + i][-1] for i in range(len(generated))])
    return oracle.largest_excess(got, reference)
