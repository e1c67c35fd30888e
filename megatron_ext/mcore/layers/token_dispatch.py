"""Tokens on their way to experts of other ranks, and back: any number of them from each rank, none twice.

Ranks of an expert-tensor-parallel group share each of their experts, those of an expert-parallel group have different
ones. Ranks that share a layer (tensor parallel) have the same tokens, for nothing is sequence parallel here. Upstream
would send, gather and compute each token once for every one of them. Here they divide the tokens: those that share
experts take the same ones, and send them to their peers in other expert-parallel ranks; what comes back is one rank's
channels of one share of the tokens, and the sum over the tensor-parallel ranks is the layer's output.

    tensor parallel 4, experts' tensor parallel 2: ranks 0 and 1 see to the first half of the tokens, 2 and 3 to the
    second; each pair to its own half of the experts' channels

Letters: T tokens of this rank, E experts, h channels.
"""

from __future__ import annotations

from typing import cast

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor


def is_alone(groups: ProcessGroupCollection) -> bool:
    """Whether a rank has all experts and all tokens for itself."""
    return all(group.size() == 1 for group in (groups.tp, groups.ep, groups.expt_tp))


class SharedTokensDispatcher(MoEAlltoAllTokenDispatcher):
    """`MoEAlltoAllTokenDispatcher` on any device, for ranks that have the same tokens where they share a layer.

    Every rank of the groups takes part in every call, each with as many tokens as it has; at least one, for the router.

    Args:
        num_local_experts: On this rank.
        local_expert_indices: Their numbers among all.
        config: Of the layer.
        pg_collection: Groups; ranks that share experts share layers, too.
    """

    def __init__(
        self,
        num_local_experts: int,
        local_expert_indices: list[int],
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection,
    ) -> None:
        sharing, experts = pg_collection.tp, pg_collection.expt_tp
        assert sharing.size() % experts.size() == 0, (sharing.size(), experts.size())
        super().__init__(num_local_experts, local_expert_indices, config, pg_collection)
        self._sharing = sharing
        self._shares = sharing.size() // experts.size()
        self._share = sharing.rank() // experts.size()
        # What upstream gathers among those who share experts they have already: no group of its own.
        self.tp_size, self.tp_rank, self.tp_ep_group = 1, 0, self.ep_group
        numbers = torch.arange(
            self.num_experts, device=self.permute_idx_device
        )  # of chunks: from a rank, for an expert
        self.sort_input_by_local_experts = numbers.view(-1, num_local_experts).T.ravel()
        self.restore_output_by_local_experts = numbers.view(num_local_experts, -1).T.ravel()

    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Sort this rank's share of the tokens by expert.

        Args:
            hidden_states: [T, 1, h].
            routing_map: [T, E], True where a token goes to an expert.
            probs: [T, E], its weights.
        """
        first, end = (len(routing_map) * share // self._shares for share in (self._share, self._share + 1))
        own = torch.zeros_like(routing_map)
        own[first:end] = routing_map[first:end]
        permuted, weights = super().dispatch_preprocess(hidden_states, own, probs)
        return cast("Tensor", permuted), cast("Tensor", weights)

    def preprocess(self, routing_map: Tensor) -> Tensor:
        """Who sends how much to whom, over all ranks: how many tokens each of our experts gets."""
        counts = super().preprocess(routing_map)
        first, end = (len(routing_map) * share // self._shares for share in (self._share, self._share + 1))
        self.num_out_tokens = (end - first) * self.config.moe_router_topk
        return cast("Tensor", counts)

    def _maybe_dtoh_and_synchronize(self, point: str, tokens_per_expert: Tensor | None = None) -> Tensor | None:
        """Bring counts to the host. Those that are there stay tensors upstream, which no collective takes as splits."""
        counts = super()._maybe_dtoh_and_synchronize(point, tokens_per_expert)
        for name in ("input_splits", "output_splits"):
            splits = getattr(self, name)
            if isinstance(splits, Tensor):
                setattr(self, name, splits.tolist())
        return cast("Tensor | None", counts)

    def combine_postprocess(self, permutated_local_input_tokens: Tensor) -> Tensor:
        """What experts gave for this rank's share of the tokens -> the output for all, [T, 1, h]."""
        own = super().combine_postprocess(permutated_local_input_tokens)
        return cast("Tensor", reduce_from_tensor_model_parallel_region(own, self._sharing))
