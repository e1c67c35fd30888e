"""CU-21: which ranks capture CUDA graphs together, and that they drop them together."""

from __future__ import annotations

import pytest
import torch

from megatron_ext.config import BatchingConfig, ParallelConfig
from megatron_ext.errors import ConfigError
from megatron_ext.mcore.core_factory import ContextResources
from megatron_ext.mcore.cuda_graph_setup import Communication, check_ranks, why_not_captured
from megatron_ext.runner.cuda_graphs.buckets import Buckets
from megatron_ext.runner.cuda_graphs.cuda_graph_runner import CudaGraphRunner
from megatron_ext.runner.cuda_graphs.graph_capture import Graph
from tests.unit_tests.support.models import CONFIGS
from tests.unit_tests.support.padded import PaddedHybridDriver

GRAPHS = BatchingConfig(cuda_graph_impl="local")
TWO = ParallelConfig(tensor_model_parallel_size=2)
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
NEW = (2, 27, 5)


class TestWhichRanksCapture:
    @pytest.mark.parametrize(
        ("messages", "device"),
        [
            (Communication(TWO, "nccl", NEW, None), CUDA),
            (Communication(TWO, "cpu:gloo,cuda:nccl", (2, 9, 6), None), CUDA),
            (Communication(TWO, "gloo", None, None), CPU),
            (Communication(ParallelConfig(), "gloo", None, None), CUDA),  # replicas
        ],
    )
    def test_can(self, messages, device):
        """CU-21: NCCL is captured; on a CPU nothing is; replicas exchange nothing in a forward."""
        check_ranks(GRAPHS, messages, device)

    @pytest.mark.parametrize(
        ("messages", "device", "words"),
        [
            (Communication(TWO, "gloo", NEW, None), CUDA, ["gloo", "--distributed-backend nccl"]),
            (Communication(TWO, "nccl", (2, 8, 4), None), CUDA, ["NCCL 2.8.4", "2.9.6"]),
            (Communication(TWO, "nccl", NEW, "NCCL_BLOCKING_WAIT"), CUDA, ["NCCL_BLOCKING_WAIT", "unset it"]),
        ],
    )
    def test_cannot(self, messages, device, words):
        """CU-21: the error has the setting, the reason and the remedy."""
        with pytest.raises(ConfigError) as caught:
            check_ranks(GRAPHS, messages, device)
        assert all(word in str(caught.value) for word in ["--cuda-graph-impl local", *words, "--cuda-graph-impl none"])
        check_ranks(BatchingConfig(), messages, device)

    @pytest.mark.parametrize("name", ["pipeline_model_parallel_size", "expert_model_parallel_size"])
    def test_sizes_whose_steps_are_eager(self, name):
        """CU-21: whatever the backend; the reason has the flag and the size."""
        sizes = ParallelConfig(**{name: 2})
        check_ranks(GRAPHS, Communication(sizes, "gloo", None, None), CUDA)
        reason = why_not_captured(sizes)
        assert reason is not None
        assert f"--{name.replace('_', '-')} 2" in reason
        assert why_not_captured(TWO) is None


class Counting:
    """Captures nothing; counts what is captured, as slowly as on a device."""

    takes_long = True

    def __init__(self) -> None:
        self.captured = 0

    def capture(self, run) -> Graph:
        self.captured += 1
        return run

    def forget(self) -> None:
        pass


@pytest.mark.parametrize("has_peers", [False, True])
def test_ranks_drop_their_graphs_together(get_oracle, has_peers):
    """CU-21: with other ranks new weights drop all graphs, moved or not, and steps capture them again one by one."""
    driver = PaddedHybridDriver(get_oracle("hybrid").model, CONFIGS["hybrid"], num_cuda_graphs=1)
    context, graphs = driver.context, Counting()
    buckets = Buckets(context.plan.limits, 1, 32, snapshots_in_prefill=True, one_width=True)
    rules, controller = context.staging_rules, driver.engine.controller
    runner = CudaGraphRunner(controller, context.plan, rules, buckets, graphs, has_peers=has_peers)
    context.cuda_graph_runner = runner
    resources = ContextResources(context, driver.engine.controller)
    context.prepare_cuda_graphs()
    at_start, a_bucket = graphs.captured, graphs.captured // len(buckets.all())
    runner.notice_new_weights()
    assert bool(runner._captured) is not has_peers
    driver.add(0, [1, 2, 3], num_tokens_to_generate=1, return_log_probs=False)
    driver.run()
    assert graphs.captured == at_start + has_peers * a_bucket
    driver.engine.core.suspend()
    resources.allocate()
    resources.capture()
    assert bool(runner._captured) is not has_peers
