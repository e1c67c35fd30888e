"""SC-12: packed weights of linear layers in an engine: computed, saved, updated, noticed, counted and agreed on."""

from __future__ import annotations

import dataclasses
import logging
import weakref
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from megatron_ext.config import BatchingConfig, ModelConfig, SourceConfig
from megatron_ext.errors import ConfigError
from megatron_ext.mcore import packed_weights
from megatron_ext.mcore.checkpoint.weight_shards import model_tensors
from megatron_ext.mcore.core_factory import ContextResources
from megatron_ext.mcore.layers.hybrid_model import HybridModel
from megatron_ext.mcore.packed_weights import PackedWeights, pack_weights, unpack_weights
from megatron_ext.mcore.weight_changes import WeightSamples, keep_samples, saved_tensors
from megatron_ext.models.load import load_model
from megatron_ext.models.megatron.dist_checkpoint import save_dist_checkpoint
from megatron_ext.ops.cpp import can_be_built
from megatron_ext.ops.linear import INT8, Packable, onednn
from tests.unit_tests.support.caching import BLOCK, CachingDriver
from tests.unit_tests.support.driver import Driver, assert_equals_oracle, make_prompt
from tests.unit_tests.support.hybrid_caching import HybridDriver
from tests.unit_tests.support.models import CONFIGS, build_slow_decay
from tests.unit_tests.support.oracle import Oracle
from tests.unit_tests.support.padded import PaddedHybridDriver
from tests.unit_tests.support.weights import WRITES, by_disk, by_edits, by_shards, by_state_dict, by_update, writer_of

pytestmark = pytest.mark.skipif(onednn.problem() is not None, reason=f"{onednn.problem()}")

PROMPT = make_prompt(2 * BLOCK + 3)
TIED = dataclasses.replace(CONFIGS["hybrid"], untie_embeddings_and_output_weights=False)
KINDS = {**{kind: CONFIGS[kind] for kind in ("hybrid", "mamba1", "experts", "gated_delta_net")}, "tied": TIED}
ALL = "onednn"  # every weight is packed: those of tests are smaller than the table's


def contents(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all tensors that a checkpoint has."""
    unpack_weights(model)
    return {name: tensor.detach().clone() for name, tensor in saved_tensors(model).items()}


def layers(model: nn.Module) -> list[Packable]:
    return [one for one in model.modules() if isinstance(one, Packable)]


def packed_model(config: ModelConfig = CONFIGS["hybrid"], *, attached: bool = False) -> tuple[nn.Module, PackedWeights]:
    """A model, and its packed weights after a first refresh."""
    model = build_slow_decay(config)
    if attached:
        keep_samples(model, WeightSamples({}, model))
    packed = PackedWeights(model, ALL)
    packed.refresh()
    return model, packed


def assert_packed(model: nn.Module) -> None:
    assert all(layer.packed is not None for layer in layers(model))
    assert any(parameter.isnan().all() for parameter in model.parameters())


def watched(model: nn.Module) -> dict[int, int]:
    """Counts of the calls of each packed weight from now on, by number of the layer."""
    counts: dict[int, int] = {}

    for number, layer in enumerate(layers(model)):
        counts[number] = 0
        product = layer.packed

        class Counted:
            def __init__(self, number: int = number, product: object = product) -> None:
                self.number, self.product, self.dense = number, product, product.dense

            def __call__(self, *arguments: object) -> Tensor:
                counts[self.number] += 1
                return self.product(*arguments)

        layer.packed = Counted()
    return counts


class TestEngine:
    @pytest.mark.parametrize(
        ("kind", "driver_class"), [*((kind, HybridDriver) for kind in KINDS), ("tied", PaddedHybridDriver)]
    )
    def test_results_are_those_of_a_recompute(self, kind, driver_class):
        """Tokens, logits and states; a prompt, and the same again from the cache. Every packed weight computes."""
        config = KINDS[kind]
        oracle, model = Oracle(build_slow_decay(config)), build_slow_decay(config)
        driver = driver_class(model, config, operator_backend=ALL, packs_weights=True, max_requests=4, max_tokens=40)
        assert_packed(model)
        counts = watched(model)
        for request_id in range(2):
            driver.add(request_id, PROMPT, num_tokens_to_generate=3)
            driver.run()
        assert driver.skipped(0, 1)[1] == 2 * BLOCK
        for request_id in range(2):
            assert_equals_oracle(driver, request_id, oracle)
        assert all(counts.values()), "each packed weight has computed"
        assert_packed(model)

    @pytest.mark.parametrize("backend", ["auto", "reference", "triton"])
    def test_small_weights_are_not_packed_unless_asked_for(self, backend):
        """The table's weights are larger; golden values of small models do not change."""
        model = build_slow_decay(CONFIGS["hybrid"])
        packed, identity = pack_weights(model, BatchingConfig(operator_backend=backend))
        assert all(layer.packed is None for layer in layers(model))
        assert (identity, packed.backend, packed.additional_bytes) == ("", "reference", 0)

    def test_large_weights_are_packed_by_the_table(self, monkeypatch):
        """The control of the test before: the same call packs what the table names."""
        row = onednn.table.Row("ANY", torch.float32, 48, 4 * 48 * 64, "onednn", "-")
        monkeypatch.setattr(onednn.table, "TABLE", (row,))
        monkeypatch.setattr(onednn.table, "row_for", lambda dtype: row)
        model = build_slow_decay(CONFIGS["hybrid"])
        packed, identity = pack_weights(model, BatchingConfig())
        for layer in layers(model):
            is_large = layer.weight.shape[1] >= 48 and layer.weight.numel() >= 48 * 64
            assert (layer.packed is not None) is is_large
        assert packed.backend == "onednn"
        assert row.limits in identity

    def test_engines_of_a_callers_model_leave_it_alone(self):
        model = build_slow_decay(CONFIGS["hybrid"])
        driver = Driver(model, CONFIGS["hybrid"], operator_backend=ALL)
        assert all(layer.packed is None for layer in layers(model))
        assert "linear" in driver.engine.controller.chosen_operators()["reference"]

    def test_a_cache_of_other_products_has_other_roots(self):
        """Blocks of engines whose weights are packed otherwise have different hashes."""
        plans = []
        for packs in (False, True):
            model = build_slow_decay(CONFIGS["hybrid"])
            driver = Driver(model, CONFIGS["hybrid"], operator_backend=ALL, packs_weights=packs)
            plans.append(driver.context.plan.fingerprint)
        assert plans[0] != plans[1]


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


class TestSaving:
    """Checkpoints of packed models, equal to the bit to those of models that were never packed."""

    @pytest.mark.parametrize("config", [CONFIGS["hybrid"], TIED, CONFIGS["experts"]], ids=["own", "tied", "experts"])
    @pytest.mark.parametrize("form", ["distributed", "state_dict"])
    def test_round_trip(self, tmp_path, config, form):
        expected = contents(build_slow_decay(config))
        model, packed = packed_model(config)
        if form == "state_dict":
            found = {name: one for name, one in model.state_dict().items() if isinstance(one, Tensor)}
            packed.refresh()
            found = {name: found[name] for name in expected}
        else:
            save_dist_checkpoint(tmp_path / "saved", model, config)
            packed.refresh()
            assert_packed(model)
            source = SourceConfig(load=str(tmp_path / "saved"), tokenizer_type="NullTokenizer")
            found = contents(load_model(source, {}, device=torch.device("cpu")).model)
        assert_same(found, expected)
        assert_packed(model)


class TestUpdates:
    """New weights compute from the next step on, packed again; old ones are nowhere."""

    @pytest.mark.parametrize(
        ("config", "write"),
        [
            *(pytest.param(CONFIGS["hybrid"], write, id=f"own-{write.__name__}") for write in WRITES),
            *(pytest.param(TIED, write, id=f"tied-{write.__name__}") for write in (by_update, by_edits)),
        ],
    )
    def test_outputs_follow(self, config, write):
        """PY-6, EX-4."""
        new = build_slow_decay(config, seed=6)
        values = contents(new)
        model = build_slow_decay(config)
        driver = CachingDriver(model, config, operator_backend=ALL, packs_weights=True)
        driver.add(0, PROMPT, num_tokens_to_generate=3)
        driver.run()
        write(model, values)
        driver.add(1, PROMPT, num_tokens_to_generate=3)
        driver.run()
        assert driver.skipped(1) == [0]
        assert_packed(model)
        assert_equals_oracle(driver, 1, Oracle(new))
        assert_same(contents(model), values)

    def test_a_tied_embedding_is_packed_again_alone(self):
        """An edit of the shared parameter, whose values stay in place, packs nothing else."""
        model, packed = packed_model(TIED)
        kept = [layer.packed for layer in layers(model)]
        with torch.no_grad():
            model.embedding.word_embeddings.weight.mul_(2)
        packed.refresh()
        again = [layer for layer, before in zip(layers(model), kept, strict=True) if layer.packed is not before]
        assert again == [model.output_layer]
        assert torch.equal(model.output_layer.packed.dense(), model.embedding.word_embeddings.weight)

    def test_steps_alone_pack_nothing(self):
        """Negative control."""
        model, packed = packed_model(TIED)
        kept = [layer.packed for layer in layers(model)]
        packed.refresh()
        assert all(layer.packed is before for layer, before in zip(layers(model), kept, strict=True))


@pytest.mark.skipif(not can_be_built(), reason="there is no C++ compiler")
class TestQuantized:
    """Engines with `--cpu-weight-quantization int8`."""

    INT8 = BatchingConfig(cpu_weight_quantization="int8")

    @staticmethod
    def driver(model: nn.Module, config: ModelConfig, quantization: str = "int8") -> CachingDriver:
        return CachingDriver(model, config, cpu_weight_quantization=quantization, packs_weights=True)

    @classmethod
    def log_probs(cls, driver: CachingDriver, request_id: int = 0) -> Tensor:
        driver.add(request_id, PROMPT, num_tokens_to_generate=1, return_log_probs=True, skip_prompt_log_probs=False)
        driver.run()
        return torch.tensor(driver.records[request_id].prompt_log_probs)

    @pytest.mark.parametrize("kind", KINDS)
    def test_log_probs_are_near(self, kind):
        """Every linear layer is quantized, experts and a tied output layer too; the embedding is not."""
        config = KINDS[kind]
        exact = self.log_probs(self.driver(build_slow_decay(config), config, "none"))
        model = build_slow_decay(config)
        driver = self.driver(model, config)
        assert {layer.packed_by for layer in layers(model)} == {INT8}
        assert driver.engine.controller.chosen_operators()["int8"] == ("linear",)
        expected = dict(build_slow_decay(config).named_parameters())["embedding.word_embeddings.weight"]
        assert torch.equal(model.embedding.word_embeddings.weight, expected)
        error = (self.log_probs(driver) - exact).abs()
        assert 0 < error.mean() < 0.15
        assert error.max() < 0.8

    @pytest.mark.parametrize(
        ("config", "write"),
        [(CONFIGS["hybrid"], by_update), (TIED, by_disk), (CONFIGS["hybrid"], by_shards), (TIED, by_state_dict)],
        ids=["own-update", "tied-disk", "own-shards", "tied-state_dict"],
    )
    def test_new_weights_are_quantized_anew(self, config, write):
        """Results equal those of an engine that was built with them, to the bit."""
        new = build_slow_decay(config, seed=6)
        values = contents(new)
        model = build_slow_decay(config)
        driver = self.driver(model, config)
        before = self.log_probs(driver)
        write(model, values)
        after = self.log_probs(driver, 1)
        assert not torch.equal(before, after)
        assert torch.equal(after, self.log_probs(self.driver(new, config)))

    def test_an_update_of_some_tensors_leaves_the_others(self):
        config = CONFIGS["hybrid"]
        model = build_slow_decay(config)
        pack_weights(model, self.INT8)
        kept = [layer.packed for layer in layers(model)]
        name = next(name for name, one in model.named_modules() if isinstance(one, Packable))
        new = contents(build_slow_decay(config, seed=6))[f"{name}.weight"]
        writer_of(model).write({f"{name}.weight": new}, partial=True)
        assert [layer.packed is before for layer, before in zip(layers(model), kept, strict=True)] == [
            False,
            *[True] * (len(kept) - 1),
        ]
        assert torch.equal(model.get_submodule(name).weight, new)

    def test_saving_is_refused(self, tmp_path):
        """Nothing writes degraded weights, or a model without them."""
        model = build_slow_decay(CONFIGS["hybrid"])
        pack_weights(model, self.INT8)
        for save in (
            lambda: save_dist_checkpoint(tmp_path / "saved", model, CONFIGS["hybrid"]),
            lambda: model_tensors(model),
            model.state_dict,
        ):
            with pytest.raises(ConfigError, match=r"quantized to int8.*without --cpu-weight-quantization"):
                save()
        assert list(tmp_path.iterdir()) == []

    def test_a_callers_model_is_refused(self):
        model = build_slow_decay(CONFIGS["hybrid"])
        with pytest.raises(ConfigError, match=r"--cpu-weight-quantization int8.*owner"):
            Driver(model, CONFIGS["hybrid"], cpu_weight_quantization="int8")

    def test_ranks_of_different_cpus_are_refused(self):
        with pytest.raises(ConfigError, match=r"CPUs differ.*OTHER"):
            pack_weights(
                build_slow_decay(CONFIGS["hybrid"]), self.INT8, TestRanks.context("int8 OTHER torch.float32 all")
            )


class TestKeptOriginals:
    """For models whose parameters others use as well."""

    def test_parameters_keep_their_values(self):
        model, packed = packed_model(attached=True)
        assert all(layer.packed is not None for layer in layers(model))
        found = {name: one.detach() for name, one in model.named_parameters()}
        assert_same(found, dict(build_slow_decay(CONFIGS["hybrid"]).named_parameters()))
        held_twice = sum(layer.weight.numel() * 4 for layer in layers(model))
        assert (packed.additional_bytes, packed.bytes_held_twice) == (held_twice, held_twice)

    def test_output_rows_that_are_read_keep_their_values(self, monkeypatch):
        """SP-15: a last stage reads them as embeddings, for multi-token prediction."""
        monkeypatch.setattr(HybridModel, "reads_output_rows", True)
        model, _ = packed_model()
        expected = build_slow_decay(CONFIGS["hybrid"]).output_layer.weight
        assert torch.equal(model.output_layer.weight, expected)

    def test_copies_are_freed_and_packed_again(self):
        """An engine that is suspended or closed frees them; those that replace a parameter stay."""
        model, packed = packed_model(TIED)
        copies = [weakref.ref(model.output_layer.packed)]
        controller = mock.Mock(packed=packed)
        controller.inference_wrapped_model.model = model
        ContextResources(mock.Mock(), controller).free()
        assert [one() for one in copies] == [None]
        assert [layer for layer in layers(model) if layer.packed is None] == [model.output_layer]
        packed.refresh()
        assert all(layer.packed is not None for layer in layers(model))


class TestMemory:
    def test_packed_models_have_no_second_copy(self):
        """Parameters of packed layers have no memory; the tied embedding is counted."""
        model, packed = packed_model(TIED)
        dense = sum(one.weight.numel() for one in layers(model) if one.weight is not None)
        held = sum(one.untyped_storage().nbytes() for one in model.parameters())
        whole = sum(one.numel() * 4 for one in build_slow_decay(TIED).parameters())
        count = sum(one.weight is not None for one in layers(model))
        assert held == whole - 4 * dense + 4 * count
        embedding = model.embedding.word_embeddings.weight.numel()
        largest = max(one.weight.numel() for one in layers(model) if one.weight is not None)
        assert packed.additional_bytes == 4 * (embedding + largest)

    def test_too_little_is_refused_before_packing(self, monkeypatch):
        model = build_slow_decay(TIED)
        monkeypatch.setattr(packed_weights.platform, "available_memory", lambda device: 1000)
        with pytest.raises(ConfigError, match=r"beside the parameters.*--no-pack-weights"):
            pack_weights(model, BatchingConfig(operator_backend=ALL))
        assert all(layer.packed is None for layer in layers(model))


class TestRanks:
    """Ranks that choose alike pack; all others compute with the reference."""

    @staticmethod
    def context(*others: str) -> SimpleNamespace:
        return SimpleNamespace(ask_all=lambda question: [question(), *others], is_driver=True)

    def test_ranks_of_different_cpus_pack_nothing(self, caplog):
        model = build_slow_decay(CONFIGS["hybrid"])
        with caplog.at_level(logging.WARNING):
            packed, identity = pack_weights(model, BatchingConfig(operator_backend=ALL), self.context("onednn OTHER"))
        assert (packed.backend, identity) == ("reference", "")
        assert all(layer.packed is None for layer in layers(model))
        assert "OTHER" in caplog.text
