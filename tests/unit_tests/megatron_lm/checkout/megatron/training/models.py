"""STAND-IN (see the package): builders of models, as 0.19 has them."""

from __future__ import annotations

from typing import Any

from torch import nn

from tests.unit_tests.support import megatron_models


class ModelBuilder:
    kind: str

    def __init__(self, config: Any) -> None:
        self._config = config

    def build_distributed_models(self, pg_collection: Any, wrap_with_ddp: bool = True) -> list[nn.Module]:
        assert not wrap_with_ddp
        return [megatron_models.build(self.kind, seed=99)]  # other weights than those that will be loaded


class GPTModelBuilder(ModelBuilder):
    kind = "llama"


class HybridModelBuilder(ModelBuilder):
    kind = "hybrid"
