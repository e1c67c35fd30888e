"""Output of an eager step in the buffers of captured ones: its tokens stay on the device and are copied to the host."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_ext.runner.cuda_graphs.async_output import Launched, OutputRow, output_layout
from megatron_ext.runner.cuda_graphs.graph_sampler import score
from megatron_ext.runner.cuda_graphs.input_buffers import AsyncModelOutput
from megatron_ext.runner.cuda_graphs.prev_sampled_token_ids import PrevSampledTokenIds
from megatron_ext.runner.model_input import ModelInput
from megatron_ext.runner.step_output import next_tokens


class EagerOutput:
    """Sampler of eager steps that leaves tokens where captured steps leave theirs.

    Args:
        answer: Device buffer of outputs, [n] int64.
        outputs: Copies of that buffer to the host.
        prev_sampled_token_ids: Rows of the tokens in the buffer.
    """

    def __init__(self, answer: Tensor, outputs: AsyncModelOutput, prev_sampled_token_ids: PrevSampledTokenIds) -> None:
        self._answer, self._outputs, self._prev_sampled_token_ids = answer, outputs, prev_sampled_token_ids

    @torch.inference_mode()
    def launch(self, logits: Tensor, step: ModelInput) -> Launched:
        """Sample and, if a row requests it, score a step; enqueue the copy of the results.

        Args:
            logits: Logits [m, V] of the step's sampling rows; at most as many as the largest captured step has.
            step: Step without drafts and scored prompts.
        """
        layout = output_layout(len(logits), logits.shape[1])
        parts = layout.parts(self._answer)
        parts["tokens"].copy_(next_tokens(logits, step))
        is_scored = any(row.sampling.top_n is not None for row in step.sampling)
        if is_scored:
            score(logits, parts)
        rows = [OutputRow(one.request_id, row, one.sampling.top_n) for row, one in enumerate(step.sampling)]
        launched = Launched(self._outputs.fetch(layout.count if is_scored else len(rows)), layout, rows)
        self._prev_sampled_token_ids.note(launched.rows)
        return launched
