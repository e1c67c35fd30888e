"""SP-15: the embedding that layers of multi-token prediction read on a last stage."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import is_main_replica

from megatron_ext.mcore import platform
from megatron_ext.mcore.layers.hybrid_model import HybridModel
from megatron_ext.models.build import resolve_spec, transformer_config
from tests.unit_tests.support.models import VOCABULARY
from tests.unit_tests.support.multi_token import with_prediction

TOKENS, POSITIONS = torch.tensor([[5, 96, 0]]), torch.tensor([[4, 5, 6]])


def stage(*, is_first: bool, is_tied: bool) -> HybridModel:
    """The first or the last stage of a model with learned positions."""
    platform.initialize()
    config = dataclasses.replace(with_prediction("attention_only"), position_embedding_type="learned_absolute")
    return HybridModel(
        transformer_config(config, torch.float32),
        resolve_spec(config),
        pre_process=is_first,
        post_process=not is_first,
        vocab_size=VOCABULARY,
        max_sequence_length=8,
        hybrid_override_pattern=config.hybrid_override_pattern,
        prediction=(config.mtp_pattern, config.mtp_layer_count),
        share_embeddings_and_output_weights=is_tied,
        position_embedding_type=config.position_embedding_type,
    )


@pytest.mark.parametrize("is_tied", [False, True])
def test_it_is_that_of_the_first_stage(monkeypatch, is_tied):
    """SP-15: of tokens and positions, after the first stage's are sent; tied rows are those of the output layer."""
    first, last = (stage(is_first=one, is_tied=is_tied) for one in (True, False))
    sent: list[torch.Tensor] = []
    monkeypatch.setattr(parallel_state, "get_embedding_group", lambda: SimpleNamespace(size=lambda: 2))
    monkeypatch.setattr(torch.distributed, "get_process_group_ranks", lambda group: [0, 1])
    monkeypatch.setattr(torch.distributed, "broadcast", lambda tensor, *_, **__: sent.append(tensor))
    first.copy_embeddings()
    monkeypatch.setattr(torch.distributed, "broadcast", lambda tensor, *_, **__: tensor.copy_(sent.pop(0)))
    last.copy_embeddings()
    embeddings = [one.embedding(TOKENS, POSITIONS) for one in (first, last)]
    assert torch.equal(*embeddings)
    last.output_layer.weight.data.zero_()
    assert torch.equal(last.embedding(TOKENS, POSITIONS), embeddings[0]) is not is_tied


def test_a_checkpoint_has_it_once():
    """SP-15: the first stage writes it."""
    first, last = (stage(is_first=one, is_tied=False).embedding.sharded_state_dict() for one in (True, False))
    assert first.keys() == last.keys()
    assert [{is_main_replica(one.replica_id) for one in each.values()} for each in (first, last)] == [{True}, {False}]
