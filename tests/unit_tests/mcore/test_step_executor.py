"""CU-6: eager steps that are launched before the tokens of the step before are read."""

from __future__ import annotations

from unittest import mock

import pytest

from megatron_ext.mcore.step_executor import StepExecutor
from megatron_ext.runner.cuda_graphs.input_buffers import PrevSampledTokenIds
from megatron_ext.scheduling.step import ScheduledStep

STEP = ScheduledStep((), 0)


@pytest.fixture
def context() -> mock.MagicMock:
    """A context whose runner has no graph for any step."""
    runner = mock.MagicMock(prev_sampled_token_ids=PrevSampledTokenIds(mock.Mock()))
    runner.find.return_value = None
    context = mock.MagicMock(cuda_graph_runner=runner)
    context.compute.return_value.rows = [(0, 0)]
    return context


@pytest.mark.parametrize("waits", [False, True])
def test_a_forward_that_waits_is_not_launched_ahead(context, waits):
    """CU-6: it would delay the tokens of the step before."""
    executor = StepExecutor(context, mock.MagicMock(waits_in_forward=waits, operators=None))
    executor.launch_next(STEP)
    assert executor.can_launch_next is not waits


def test_a_step_that_fails_leaves_no_tokens(context):
    """CU-6: a step that fails is followed by none that takes tokens, its own or those of the step before."""
    executor = StepExecutor(context, mock.MagicMock(operators=None))
    executor.launch(STEP)
    assert executor.can_launch_next
    context.compute.side_effect = RuntimeError("the device is gone")
    with pytest.raises(RuntimeError, match="the device is gone"):
        executor.launch(STEP)
    assert not executor.can_launch_next
