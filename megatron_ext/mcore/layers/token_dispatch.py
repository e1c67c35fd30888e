"""Token dispatch to experts of other ranks and back: any number of tokens per rank, each sent once.

Ranks of an expert-tensor-parallel group share each of their experts; ranks of an expert-parallel group have different
ones. Tensor-parallel ranks of a layer have the same tokens, as nothing is sequence parallel here. Upstream would send,
gather and compute each token once for every such rank. Here these ranks divide the tokens: ranks that share experts
take the same tokens and send them to their peers in other expert-parallel ranks. The result is one rank's channels of
one share of the tokens, and the sum over the tensor-parallel ranks is the layer's output.

    tensor parallel 4, experts' tensor parallel 2: ranks 0 and 1 take the first half of the tokens, 2 and 3 the
    second; each rank of a pair takes its own half of the experts' channels

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
    """Return whether this rank alone has all experts and all tokens."""
    return all(group.size() == 1 for group in (groups.tp, groups.ep, groups.expt_tp))


class SharedTokensDispatcher(MoEAlltoAllTokenDispatcher):
    """`MoEAlltoAllTokenDispatcher` on any device, for tensor-parallel ranks that have the same tokens.

    Every rank of the groups takes part in every call with its own number of tokens; at least one, for the router.

    Args:
        num_local_experts: Experts on this rank.
        local_expert_indices: Numbers of these experts among all.
        config: Configuration of the layer.
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
        # Ranks that share experts already have the tokens that upstream gathers between them: no group is needed.
        self.tp_size, self.tp_rank, self.tp_ep_group = 1, 0, self.ep_group
        numbers = torch.arange(
            self.num_experts, device=self.permute_idx_device
        )  # chunk numbers: one per sending rank and expert
        self.sort_input_by_local_experts = numbers.view(-1, num_local_experts).T.ravel()
        self.restore_output_by_local_experts = numbers.view(num_local_experts, -1).T.ravel()

    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Sort this rank's share of the tokens by expert.

        Args:
            hidden_states: [T, 1, h].
            routing_map: [T, E], True if a token goes to an expert.
            probs: [T, E], router weights of the tokens.
        """
        first, end = (len(routing_map) * share // self._shares for share in (self._share, self._share + 1))
        own = torch.zeros_like(routing_map)
        own[first:end] = routing_map[first:end]
        permuted, weights = super().dispatch_preprocess(hidden_states, own, probs)
        return cast("Tensor", permuted), cast("Tensor", weights)

    def preprocess(self, routing_map: Tensor) -> Tensor:
        """Exchange the token counts of all ranks; return the number of tokens for each of this rank's experts."""
        counts = super().preprocess(routing_map)
        first, end = (len(routing_map) * share // self._shares for share in (self._share, self._share + 1))
        self.num_out_tokens = (end - first) * self.config.moe_router_topk
        return cast("Tensor", counts)

    def _maybe_dtoh_and_synchronize(self, point: str, tokens_per_expert: Tensor | None = None) -> Tensor | None:
        """Copy counts to the host as lists: upstream leaves tensors, which no collective accepts as splits."""
        counts = super()._maybe_dtoh_and_synchronize(point, tokens_per_expert)
        for name in ("input_splits", "output_splits"):
            splits = getattr(self, name)
            if isinstance(splits, Tensor):
                setattr(self, name, splits.tolist())
        return cast("Tensor | None", counts)

    def combine_postprocess(self, permutated_local_input_tokens: Tensor) -> Tensor:
        """Reduce the experts' results for this rank's share of the tokens to the output for all tokens, [T, 1, h]."""
        own = super().combine_postprocess(permutated_local_input_tokens)
        return cast("Tensor", reduce_from_tensor_model_parallel_region(own, self._sharing))
