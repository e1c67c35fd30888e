"""CU-20: a warm-up launches every kernel variant that an engine's requests launch later."""

from __future__ import annotations

import dataclasses
import logging
import random
from collections import defaultdict
from unittest import mock

import pytest
import torch

from megatron_ext.config import BatchingConfig, CacheConfig, ModelConfig, RequestParams
from megatron_ext.config.speculation import NO_SPECULATION, SpeculationConfig
from megatron_ext.mcore import assemble, platform
from megatron_ext.mcore.adapter import InferenceEngine
from megatron_ext.mcore.warm_up import PHASE, PROFILE, WarmUpPart, run_tasks, warm_up
from megatron_ext.memory import budget, state_pool
from megatron_ext.models.build import build_model
from megatron_ext.ops import triton
from megatron_ext.ops.backends import preferring
from megatron_ext.ops.triton.kernel_registry import Argument, Config, Kernel, Launch, _observers, watch
from megatron_ext.runner import warm_up as steps
from megatron_ext.runner.warm_up import StepClass
from tests.unit_tests.support.driver import SETTINGS
from tests.unit_tests.support.models import CONFIGS
from tests.unit_tests.support.tokenizers import PieceTokenizer

pytestmark = pytest.mark.skipif(
    triton.problem(platform.device()) is not None, reason=f"no kernel runs here: {triton.problem(platform.device())}"
)
WORDS = 97
# Heads whose number is odd: neither one token of a projection nor all states of a request are multiples of 16 bytes.
ODD = {
    "hybrid": {"mamba_num_heads": 3, "mamba_num_groups": 1},
    "gated_delta_net": {"linear_num_value_heads": 3, "linear_num_key_heads": 1},
    "short_conv": {"short_conv_kernel_dim": 3},
}


def config_of(kind: str, pattern: str) -> ModelConfig:
    return dataclasses.replace(CONFIGS[kind], hybrid_override_pattern=pattern, kv_channels=16, **ODD.get(kind, {}))


@dataclasses.dataclass
class Built:
    """An engine whose operators are Triton's, and the parts of its warm-up."""

    engine: InferenceEngine
    parts: list[WarmUpPart]
    tokens: dict[int, list[int]] = dataclasses.field(default_factory=dict)

    def warmed(self) -> set[Launch]:
        """Kernel variants that the warm-up launches."""
        with watch() as launches:
            run_tasks(self.parts, is_visible=False)
        return set(launches)

    def warmed_by_class(self) -> dict[StepClass | None, set[Launch]]:
        """Kernel variants that each class of steps of the model launches; those of copies by None."""
        (part,), context = self.parts, self.engine.context
        classes, found = iter(steps.step_classes(context.plan, context.staging_rules)), defaultdict(set)
        with preferring(part.operators):
            for task in part.tasks():
                with watch() as launches:
                    task()
                found[next(classes, None)] |= set(launches)
        return found

    def served(self, requests: int = 60) -> set[Launch]:
        """Kernel variants that random requests launch: shared prefixes, arrivals at any step, all kinds of sampling."""
        source, engine = random.Random(4), self.engine
        documents = [[source.randrange(WORDS) for _ in range(80)] for _ in range(4)]
        with watch() as launches:
            for number in range(requests):
                prompt = [*source.choice(documents)[: source.randrange(1, 70)], source.randrange(WORDS)]
                params = RequestParams(
                    num_tokens_to_generate=source.randrange(1, 10),
                    temperature=source.choice([0.0, 1.0]),
                    logit_bias=source.choice([(), ((5, 1.0),)]),
                    ignore_eos=True,
                )
                engine.add_request(number, prompt, params)
                for _ in range(source.randrange(4)):
                    self._step()
            while engine.has_unfinished_requests():
                self._step()
        return set(launches)

    def _step(self) -> None:
        if self.engine.has_unfinished_requests():
            ended = self.engine.core.step().records
            self.tokens |= {record.request_id: record.generated_tokens for record in ended}


@pytest.fixture
def build(monkeypatch):
    """Builds engines whose kernels are launched, but compute nothing unless asked to: variants depend on no value."""

    def build(
        config: ModelConfig,
        dtype: torch.dtype = torch.float32,
        *,
        computes: bool = False,
        speculation: SpeculationConfig = NO_SPECULATION,
        **batching: object,
    ) -> Built:
        if not computes:
            monkeypatch.setattr(Kernel, "launch", _note_only)
        monkeypatch.setattr(state_pool.state_copy, "copy_known_rows", _copy_as_on_a_device)
        batching = {"max_requests": 12, "max_tokens": 40, "operator_backend": "triton"} | batching
        tokenizer, device = PieceTokenizer(WORDS), torch.device("cpu")
        with mock.patch.object(assemble, "warm_up") as called:
            engine = assemble.build_engine(
                build_model(config, device=device, dtype=dtype, seed=3),
                config,
                tokenizer,
                BatchingConfig(**(SETTINGS | batching)),
                CacheConfig(),
                dtype=dtype,
                speculation=speculation,
            )
        return Built(engine, called.call_args.args[0])

    return build


def _note_only(kernel: Kernel, grid: tuple[int, ...], config: Config, **arguments: Argument) -> None:
    """Launch nothing; sampled tokens, and those that experts get, are token 0."""
    if 0 not in grid:
        for observe in _observers:
            observe(kernel, config, arguments)
        for name in {"draw_rows": ["tokens"], "sort_by_expert": ["tokens", "offsets"]}.get(kernel.name, ()):
            arguments[name].zero_()


def _copy_as_on_a_device(pairs, rows, target_rows) -> None:
    state_pool.state_copy.copy_rows(*pairs, torch.tensor(rows), torch.tensor(target_rows))


DROPPED = {
    "copies": lambda one: one is None,
    "decodes before a prefill": lambda one: one and one.decodes > 0 and one.tokens > 0,
    "four decodes before a prefill": lambda one: one and one.decodes == 4 and one.tokens > 0,
    "prefills of several tokens": lambda one: one and one.tokens > 1,
    "states kept inside": lambda one: one and one.keeps,
    "draws": lambda one: one and one.sampling == steps.DRAWN,
    "draws from processed logits": lambda one: one and one.sampling == steps.PROCESSED,
}


class TestRandomRequests:
    def test_launch_nothing_new(self, build, monkeypatch):
        """CU-20: heads of an odd number, an arena for blocks and states, 16 bits; each class matters."""
        monkeypatch.setattr(budget, "SHARES_MEMORY", True)
        built = build(config_of("hybrid", "M*-"), torch.bfloat16, block_count=None, buffer_size_gb=0.01)
        assert built.engine.context.plan.limits.slabs is not None
        by_class, served = built.warmed_by_class(), built.served()
        assert served <= set().union(*by_class.values())
        assert {"copy_states", "draw_rows", "paged_prefill"} <= {one.kernel for one in served}
        for name, is_dropped in DROPPED.items():
            left = [launches for one, launches in by_class.items() if not is_dropped(one)]
            assert not served <= set().union(*left), f"warm-up without {name}"

    @pytest.mark.parametrize(
        ("kind", "pattern"),
        [
            ("gated_delta_net", "M*-"),
            pytest.param("mamba1", "M*-", marks=pytest.mark.long),
            pytest.param("side_by_side", "P-", marks=pytest.mark.long),
            pytest.param("short_conv", "M*-", marks=pytest.mark.long),
            pytest.param("experts", "ME*E", marks=pytest.mark.long),
            pytest.param("attention_only", "*-", marks=pytest.mark.long),
        ],
    )
    def test_of_each_kind_of_layer(self, build, kind, pattern):
        """CU-20."""
        built = build(config_of(kind, pattern))
        assert built.served() <= built.warmed()

    def test_beside_a_layer_of_multi_token_prediction(self, build):
        """CU-20: it has kernels of its own, and reads the hidden states of the dummy requests, forgotten at the end."""
        config = dataclasses.replace(
            config_of("hybrid", "M-"),
            mtp_num_layers=1,
            mtp_use_repeated_layer=True,
            mtp_hybrid_override_pattern="M*-",
        )
        speculation = SpeculationConfig(speculative_method="mtp", num_speculative_tokens=2, speculative_adaptive=False)
        built = build(config, speculation=speculation)
        warmed = built.warmed()
        assert not built.engine.context.drafting._layer._hidden._places
        served = built.served(20)
        assert served <= warmed
        assert not served <= Built(built.engine, built.parts[:1]).warmed()
        assert built.engine.core.counters.drafted > 0


class TestLimits:
    def test_snapshot_slots_hold_nothing_afterwards(self, build):
        """CU-20: a dummy request's states are no snapshot."""
        built = build(config_of("hybrid", "M*-"))
        built.warmed()
        assert set(built.engine.context.allocated.snapshots._contents) == {None}


class TestFullSteps:
    """EX-6: what a profile run computes; `fake_cuda` runs it."""

    def test_they_can_be_computed(self, build):
        built = build(config_of("hybrid", "M*-"), max_requests=12, max_tokens=40, max_sequence_length=16)
        for step in steps.full_steps(built.engine.context.plan, built.engine.context.staging_rules):
            built.parts[0].run(step)


class TestStart:
    def test_on_cpus_nothing_is_computed_and_nothing_said(self, build, caplog):
        """CU-20."""
        caplog.set_level(logging.INFO)
        parts, phase = build(config_of("hybrid", "M*-")).parts, mock.MagicMock()
        caplog.clear()
        with watch() as launches:
            warm_up(parts, phase)
        assert not launches
        assert not phase.called
        assert not caplog.records

    def test_where_kernels_are_compiled_it_is_a_phase(self, build, monkeypatch):
        """CU-20."""
        parts, phase = build(config_of("hybrid", "M*-")).parts, mock.MagicMock()
        monkeypatch.setattr(triton, "compiles", lambda device, preferred: preferred == "triton")
        with watch() as launches:
            warm_up(parts, phase, is_visible=False)
        phase.assert_called_once_with(PHASE)
        assert launches

    def test_on_a_device_a_profile_run_follows(self):
        """EX-6."""
        part, phase = mock.MagicMock(is_needed=False, operators=None), mock.MagicMock()
        part.context.staging_rules.device = torch.device("cuda")
        part.largest_bytes.return_value = part.context.plan.activation_bytes = 1
        warm_up([part], phase)
        phase.assert_called_once_with(PROFILE)


@pytest.mark.parametrize("pipeline", [0, 1])
def test_a_drafting_layer_of_one_stage(build, caplog, pipeline):
    """CU-20: stages have the same steps, so a layer that one of them lacks is left out; on a CPU that needs no line."""
    built = build(config_of("hybrid", "M*-"))
    layers, ranks = [mock.Mock()], mock.Mock(places=[mock.Mock(pipeline=0), mock.Mock(pipeline=pipeline)])
    with mock.patch.object(triton, "compiles", return_value=False):
        parts = assemble._parts_to_warm_up(built.engine.controller, layers, ranks)
        assert len(parts) == 2 - pipeline
        assert caplog.messages == []
    with mock.patch.object(triton, "compiles", return_value=True):
        assemble._parts_to_warm_up(built.engine.controller, layers, ranks)
    assert len(caplog.messages) == pipeline
