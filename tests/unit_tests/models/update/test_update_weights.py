"""PY-6: new weights by the names of the format: what is in the model then is what loading them would put there."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from megatron_ext.config import SourceConfig
from megatron_ext.errors import ConfigError, WeightUpdateError
from megatron_ext.mcore.checkpoint.weight_shards import model_tensors
from megatron_ext.models.build import build_model
from megatron_ext.models.huggingface.tensors import EMBEDDING
from megatron_ext.models.load import load_model
from megatron_ext.models.megatron.dist_checkpoint import save_dist_checkpoint
from megatron_ext.models.update import disk
from megatron_ext.models.update.disk import swap_weights
from megatron_ext.models.update.naming import MegatronNames, naming_of
from megatron_ext.models.weight_files import WEIGHTS_FILE
from tests.unit_tests.models.megatron import megatron_lm
from tests.unit_tests.models.megatron.megatron_lm import GPT, gpt_arguments, gpt_model, perturbed
from tests.unit_tests.support.models import CONFIGS, build_slow_decay
from tests.unit_tests.support.weights import writer_of

CPU = torch.device("cpu")
NULL = {"tokenizer_type": "NullTokenizer"}
# Every kind of layer and of conversion that there is.
SHAPES = ("llama", "llama, tied", "nemotron", "nemotron MoE, latent, one expert a token", "qwen3_next moe", "jamba moe")


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model_tensors(model).items()}


def changed(tensors: Mapping[str, Tensor], seed: int = 3) -> dict[str, Tensor]:
    """Other values of the same shapes and types; tensors that were equal stay so."""
    generator = torch.Generator().manual_seed(seed)
    noise: dict[tuple, Tensor] = {}

    def of(tensor: Tensor) -> Tensor:
        key = (tuple(tensor.shape), tensor.double().sum().item())
        return noise.setdefault(key, torch.randn(tensor.shape, generator=generator).to(tensor.dtype))

    return {name: tensor + 0.1 * of(tensor) for name, tensor in tensors.items()}


def assert_equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    different = [name for name in found if not torch.equal(found[name], expected[name])]
    assert different == []


def updated(source: SourceConfig, new: object, **options: bool) -> dict[str, Tensor]:
    loaded = load_model(source, {}, device=CPU)
    writer_of(loaded.model, naming_of(source, loaded.config)).write(new, **options)
    return tensors_of(loaded.model)


def hf_tensors(directory: Path) -> dict[str, Tensor]:
    return {name: one for file in sorted(directory.glob("*.safetensors")) for name, one in load_file(file).items()}


@pytest.fixture(params=SHAPES)
def hugging_face(request: pytest.FixtureRequest, oracles, tmp_path: Path) -> tuple[Path, Path]:
    """A checkpoint that transformers wrote, and one of the same model with other weights."""
    old = oracles(request.param)[1]
    new = shutil.copytree(old, tmp_path / "new", ignore=shutil.ignore_patterns("*.safetensors*"))
    save_file(changed(hf_tensors(old)), new / WEIGHTS_FILE, metadata={"format": "pt"})
    return old, new


class TestHuggingFace:
    """Names as in the checkpoint's files."""

    def source(self, directory: Path) -> SourceConfig:
        return SourceConfig(load_hf=str(directory), **NULL)

    def test_as_loaded(self, hugging_face):
        """PY-6: bitwise, whatever is put together, cut up or shifted on the way."""
        old, new = hugging_face
        before = tensors_of(load_model(self.source(old), {}, device=CPU).model)
        expected = tensors_of(load_model(self.source(new), {}, device=CPU).model)
        assert all(not torch.equal(before[name], expected[name]) for name in before)  # the control
        assert_equal(updated(self.source(old), hf_tensors(new)), expected)
        bare = ((name.removeprefix("model.").removeprefix("backbone."), one) for name, one in hf_tensors(new).items())
        assert_equal(updated(self.source(old), bare), expected)

    def test_in_parts(self, hugging_face):
        """PY-6: layer by layer, each with all that makes up a tensor of ours."""
        old, new = hugging_face
        loaded = load_model(self.source(old), {}, device=CPU)
        naming, parts = naming_of(self.source(old), loaded.config), {}
        for name, tensor in hf_tensors(new).items():
            layer = name.split(".layers.")[1].split(".")[0] if ".layers." in name else "rest"
            parts.setdefault(layer, {})[name] = tensor
        assert len(parts) > 1
        shapes = {name: tuple(one.shape) for name, one in naming.select_weights(hf_tensors(new)).items()}
        assert writer_of(loaded.model, naming).shapes() == shapes
        for part in parts.values():
            writer_of(loaded.model, naming).write(part, partial=True)
        assert_equal(tensors_of(loaded.model), tensors_of(load_model(self.source(new), {}, device=CPU).model))


class TestMegatron:
    """Names of the parameters of Megatron's model."""

    def test_own_names_of_the_embedded_model_and_of_random_ones(self):
        for source, overrides in (
            (SourceConfig(), {}),
            (SourceConfig(**NULL), {"mamba_num_groups": 2, "vocab_size": 64}),
        ):
            loaded = load_model(source, overrides, device=CPU)
            new = changed(tensors_of(loaded.model))
            writer_of(loaded.model, naming_of(source, loaded.config)).write(new)
            assert_equal(tensors_of(loaded.model), new)

    def test_rounded_as_loading_rounds(self, tiny_model, tiny_config, tmp_path):
        """PY-6: any floating point dtype is rounded to the dtypes of the parameters."""
        new = build_model(tiny_config, device=CPU, seed=8)
        save_dist_checkpoint(tmp_path / "old", tiny_model, tiny_config)
        save_dist_checkpoint(tmp_path / "new", new, tiny_config)
        source = SourceConfig(load=str(tmp_path / "old"), bf16=True, **NULL)
        expected = tensors_of(load_model(dataclasses.replace(source, load=str(tmp_path / "new")), {}, device=CPU).model)
        assert_equal(updated(source, {name: one.double() for name, one in tensors_of(new).items()}), expected)

    @pytest.mark.parametrize("fused", [True, False], ids=["Transformer Engine", "local"])
    def test_a_hybrid_of_megatron_lm(self, tiny_model, tiny_config, tmp_path, fused):
        """PY-6: the checkpoint has scales of Transformer Engine too, which inference does not use."""
        tensors = megatron_lm.stored_tensors(tiny_model, tiny_config, fused=fused)
        directory = megatron_lm.write(tmp_path, tensors, megatron_lm.arguments(tiny_config))
        source = SourceConfig(load=str(directory), **NULL)
        new = build_model(tiny_config, device=CPU, seed=8)
        names = {
            megatron_lm._fused_key(name, tiny_config) if fused else name: one for name, one in new.named_parameters()
        }
        assert_equal(updated(source, names | {"decoder.layers.0.mixer.in_proj._extra_state": None}), tensors_of(new))
        assert_equal(updated(source, new.named_parameters()), tensors_of(new))  # norms of their own, as ours have them

    def test_gpt(self, tmp_path):
        """PY-6: upstream's own model, whose layers are two of ours."""
        old = gpt_model(GPT)
        directory = megatron_lm.write(tmp_path / "old", dict(old.named_parameters()), gpt_arguments(GPT))
        source = SourceConfig(load=str(directory), **NULL)
        new = nn.Module.requires_grad_(gpt_model(GPT))
        with torch.no_grad():
            for parameter in new.parameters():
                parameter.mul_(1.5).add_(0.1)
        other = megatron_lm.write(tmp_path / "new", dict(new.named_parameters()), gpt_arguments(GPT))
        expected = tensors_of(load_model(dataclasses.replace(source, load=str(other)), {}, device=CPU).model)
        assert_equal(updated(source, new.named_parameters()), expected)

    def test_a_padded_vocabulary(self, tiny_config):
        """PY-6: rows that the model does not keep are left out, whether they are given or not."""
        model = perturbed(build_model(tiny_config, device=CPU, seed=3))
        naming = MegatronNames(in_gpt=False, vocabulary=(64, 50))
        new = changed(tensors_of(model))
        padded = dict(new)
        padded[EMBEDDING] = torch.cat([new["embedding.word_embeddings.weight"], torch.ones(14, 32)])
        writer_of(model, naming).write(padded)
        assert_equal(tensors_of(model), new)
        padded[EMBEDDING] = torch.ones(63, 32)
        with pytest.raises(ConfigError, match=r"embeddings.weight has shape \(63, 32\); the model's has"):
            writer_of(model, naming).write(padded)


class TestRefused:
    """All or nothing: errors are reported by name before anything is written."""

    NORM = "decoder.layers.0.norm.weight"
    CASES: tuple[tuple[Callable[[dict], object], str], ...] = (
        (lambda new: {}, "no tensor is given; give all of the model's, or some with partial=True"),
        (lambda new: 5, "named tensors are of type int; give a dict, or pairs of name and tensor"),
        (lambda new: [(3, new[TestRefused.NORM])], "the name 3 is of type int; give a text"),
        (lambda new: [*new.items(), *new.items()], "tensor embedding.word_embeddings.weight is given twice"),
        (
            lambda new: new | {"decoder.layers.0.norm.wieght": new[TestRefused.NORM]},
            "did you mean decoder.layer",
        ),
        (
            lambda new: _without(new, TestRefused.NORM),
            "layers.0.norm.weight of the model are missing; give all tensors",
        ),
        (lambda new: new | {TestRefused.NORM: torch.ones(31)}, "weight has shape (31,); the model's has (32,)"),
        (
            lambda new: new | {TestRefused.NORM: torch.ones(32).int()},
            "weight is of type int32; supported are float32",
        ),
        (lambda new: new | {TestRefused.NORM: [1.0] * 32}, "weight is of type list; give a tensor"),
        (
            lambda new: new | {TestRefused.NORM: torch.ones(32, device="meta")},
            "is on the meta device and has no",
        ),
        (lambda new: new | {TestRefused.NORM: torch.ones(32).to_sparse()}, "weight is sparse_coo; give a dense tensor"),
        (
            lambda new: new | {TestRefused.NORM: _Spread(torch.ones(32))},
            "weight is sharded over ranks; give decoder",
        ),
    )

    @pytest.mark.parametrize(("change", "message"), CASES, ids=[message[:40] for _, message in CASES])
    def test_nothing_is_written(self, tiny_config, change, message):
        """PY-6: though the wrong one is the last of all."""
        model = build_model(tiny_config, device=CPU, seed=3)
        before = tensors_of(model)
        with pytest.raises(ConfigError) as caught:
            writer_of(model).write(change(changed(before)))
        assert message in str(caught.value)
        assert_equal(tensors_of(model), before)

    def test_some_of_them_only_if_that_is_said(self, tiny_config):
        model = build_model(tiny_config, device=CPU, seed=3)
        before = tensors_of(model)
        writer_of(model).write({self.NORM: torch.full((32,), 2.0)}, partial=True)
        assert_equal(tensors_of(model), before | {self.NORM: torch.full((32,), 2.0)})

    def test_parts_of_one_tensor_come_together(self, oracles):
        """PY-6: query, key and value are one tensor here."""
        directory = oracles("llama")[1]
        source = SourceConfig(load_hf=str(directory), **NULL)
        loaded = load_model(source, {}, device=CPU)
        before, naming = tensors_of(loaded.model), naming_of(source, loaded.config)
        given = {
            name: one for name, one in changed(hf_tensors(directory)).items() if "q_proj" in name or "norm" in name
        }
        with pytest.raises(ConfigError, match=r"^layers.0.self_attn.q_proj.weight is one tensor with layers.0.self"):
            writer_of(loaded.model, naming).write(given, partial=True)
        assert_equal(tensors_of(loaded.model), before)

    def test_a_tied_output_that_differs(self, oracles):
        directory = oracles("llama, tied")[1]
        source = SourceConfig(load_hf=str(directory), **NULL)
        loaded = load_model(source, {}, device=CPU)
        new = hf_tensors(directory)
        naming = naming_of(source, loaded.config)
        output = new["model.embed_tokens.weight"].clone()
        writer_of(loaded.model, naming).write(new | {"lm_head.weight": output})
        with pytest.raises(ConfigError, match=r"^lm_head.weight is tied to embed_tokens.weight in this model"):
            writer_of(loaded.model, naming).write(new | {"lm_head.weight": output + 1})

    def test_an_error_between_two_writes(self, oracles, monkeypatch):
        """PY-6: with a copy, memory that runs out in the middle leaves the model as it was; without one it is told."""
        directory = oracles("llama")[1]
        source = SourceConfig(load_hf=str(directory), **NULL)
        loaded = load_model(source, {}, device=CPU)
        before, naming = tensors_of(loaded.model), naming_of(source, loaded.config)

        def fail(*_: object, **__: object) -> None:
            raise torch.cuda.OutOfMemoryError("no memory")

        monkeypatch.setattr("megatron_ext.models.update.naming.torch.cat", fail)
        new = changed(hf_tensors(directory))
        with pytest.raises(WeightUpdateError, match="no memory; the old weights are back"):
            writer_of(loaded.model, naming).write(new, keep_old=True)
        assert_equal(tensors_of(loaded.model), before)
        with pytest.raises(WeightUpdateError, match="no memory; write all weights again"):
            writer_of(loaded.model, naming).write(new)
        with pytest.raises(AssertionError):
            assert_equal(tensors_of(loaded.model), before)

    def test_an_exchange_that_fails_leaves_both_as_they_were(self, monkeypatch):
        """SE-5: the second tensor can be read and not written to, so it fails after the first was exchanged."""
        model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
        before = tensors_of(model)
        first, second = list(before)[:2]
        new = {first: torch.zeros_like(before[first]), second: torch.zeros(1, *before[second].shape[1:])}
        with pytest.raises(RuntimeError):
            swap_weights(model, new)
        assert_equal(tensors_of(model), before)
        assert not any(one.any() for one in new.values())
        swapped: list[Tensor] = []

        def fail_once(one: Tensor, other: Tensor) -> None:
            swapped.append(one)
            if len(swapped) == 2:
                raise torch.cuda.OutOfMemoryError("no memory")
            swap(one, other)

        swap = disk._swap
        monkeypatch.setattr(disk, "_swap", fail_once)
        with pytest.raises(torch.cuda.OutOfMemoryError):
            swap_weights(model, {name: torch.zeros_like(one) for name, one in before.items()})
        assert_equal(tensors_of(model), before)

    def test_the_first_rank_that_failed_is_named_once_all_are_back(self):
        """PY-6: every rank writes its old weights back, and tells the same error."""
        answers = iter(([None, "a", "b"], [None, None]))
        ranks = SimpleNamespace(ask_all=lambda ask: next(answers))
        new = SimpleNamespace(write=lambda: None, put_back=mock.Mock(), is_exact=True, tensors={})
        writer = writer_of(build_slow_decay(CONFIGS["hybrid"]), ranks=ranks)
        with pytest.raises(WeightUpdateError, match=r"rank 1: a; the old weights are back"):
            writer._replace(new)
        new.put_back.assert_called_once()
        writer._replace(new)
        new.put_back.assert_called_once()

    @pytest.mark.parametrize("naming", [MegatronNames(has_prediction=False), MegatronNames(False, (4, 4), False)])
    def test_layers_that_the_model_does_not_have_are_left_out(self, naming):
        """SP-10: a trainer gives those of multi-token prediction, too."""
        assert naming.select_weights({"mtp.layers.0.norm.weight": torch.ones(2)}) == {}

    def test_a_tensor_with_and_without_its_prefix(self, oracles):
        """PY-6: one of the two values would be dropped without a word."""
        directory = oracles("llama")[1]
        source = SourceConfig(load_hf=str(directory), **NULL)
        loaded = load_model(source, {}, device=CPU)
        new = hf_tensors(directory)
        with pytest.raises(ConfigError, match=r"embed_tokens.weight is given twice, with a prefix and without"):
            writer_of(loaded.model, naming_of(source, loaded.config)).write(
                new | {"embed_tokens.weight": new["model.embed_tokens.weight"]}
            )


def _without(tensors: dict, name: str) -> dict:
    return {other: one for other, one in tensors.items() if other != name}


class _Spread(torch.Tensor):
    def full_tensor(self) -> Tensor:
        raise NotImplementedError
