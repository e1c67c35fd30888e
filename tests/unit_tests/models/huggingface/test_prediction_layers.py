"""SP-8: layers of multi-token prediction in Hugging Face checkpoints.

transformers has no such layers. The expected states are the published formula, in fp64, around a decoder layer of
transformers' own; names and shapes are those of published files.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from megatron_ext.config import SourceConfig
from megatron_ext.errors import CheckpointError, ConfigError
from megatron_ext.models.huggingface.export import export_hf_checkpoint
from megatron_ext.models.load import load_model, save_model
from tests.on_request import long_except
from tests.unit_tests.models.huggingface import oracles as oracle
from tests.unit_tests.models.huggingface.oracles import CPU, NULL, excess, load_hf
from tests.unit_tests.models.huggingface.test_export import assert_same_files
from tests.unit_tests.support.prediction import prediction_logits

# Shape whose last attention layer, and the layer with experts or the MLP after it, are the model of the drafting one.
SHAPES = {
    "qwen3_next": "qwen3_next moe",
    "qwen3_next, dense": "qwen3_next",
    "qwen3_5": "qwen3_5, as many heads, other window, base and share, yarn",
    "qwen3_5_moe": "qwen3_5 moe",
    "nemotron_h": "nemotron MoE",
}
WIDTH = 32
READ = {"mtp_num_layers": 1, "mtp_use_repeated_layer": True}
DEPTHS = 3
Tensors = dict[str, Tensor]


def noise(*shape: int, seed: int, around: float = 0.0) -> Tensor:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return around + 0.2 * drawn if len(shape) == 1 else drawn * shape[-1] ** -0.5


class Head(nn.Module):
    """The published formula in fp64; its state dict has the published names."""

    def __init__(self, theirs: nn.Module) -> None:
        super().__init__()
        self.trunk = copy.deepcopy(theirs).double().eval()
        self.trunk.config._experts_implementation = "eager"  # grouped products have no fp64
        self.is_nemotron = theirs.config.model_type == "nemotron_h"
        layers = self.trunk.model.layers
        if self.is_nemotron:
            kinds = ("full_attention", "moe")
            self.layers = [copy.deepcopy(next(one for one in layers if one.block_type == kind)) for kind in kinds]
        else:
            attends = [one for one in layers if one.block_type == "full_attention"]
            self.layers = [copy.deepcopy(attends[-1])]
        self.epsilon = getattr(theirs.config, "layer_norm_epsilon", None) or theirs.config.rms_norm_eps
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for layer in self.layers:
                for parameter in layer.parameters():
                    drawn = torch.randn(parameter.shape, generator=generator).double()
                    parameter += 0.1 * drawn * (1.0 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5)
                    parameter.copy_(parameter.float())
        around = 1.0 if self.is_nemotron else 0.0
        self.enorm, self.hnorm, self.norm = (noise(WIDTH, seed=seed, around=around).double() for seed in (1, 2, 3))
        self.projection = noise(WIDTH, 2 * WIDTH, seed=4).double()

    def normed(self, x: Tensor, weight: Tensor) -> Tensor:
        factor = weight if self.is_nemotron else 1 + weight
        return x * (x.square().mean(-1, keepdim=True) + self.epsilon).rsqrt() * factor

    def layer(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1])[None]
        for layer in self.layers:
            if self.is_nemotron:
                x = layer(x)
            else:
                x = layer(
                    x,
                    position_embeddings=self.trunk.model.rotary_emb(
                        x, positions.expand(3, 1, -1) if "qwen3_5" in self.trunk.config.model_type else positions
                    ),
                )
            x = x[0] if isinstance(x, tuple) else x
        return x

    @torch.no_grad()
    def logits(self, tokens: list[int]) -> Iterator[Tensor]:
        """Yield the logits of each depth, [s - d, V]."""
        ids = torch.tensor([tokens])
        hidden = self.trunk.model(ids).last_hidden_state
        embedded = self.trunk.get_input_embeddings()(ids)
        for depth in range(1, DEPTHS + 1):
            parts = self.normed(embedded[:, depth:], self.enorm), self.normed(hidden[:, :-1], self.hnorm)
            hidden = self.normed(self.layer(torch.cat(parts, dim=-1) @ self.projection.T), self.norm)
            yield self.trunk.lm_head(hidden)[0]

    def tensors(self) -> Tensors:
        """Tensors under their published names."""
        if self.is_nemotron:
            found = {"mtp.layers.0.enorm": self.enorm, "mtp.layers.0.hnorm": self.hnorm}
            found |= {"mtp.layers.0.eh_proj": self.projection, "mtp.layers.1.final_layernorm": self.norm}
        else:
            found = {"mtp.pre_fc_norm_embedding": self.enorm, "mtp.pre_fc_norm_hidden": self.hnorm}
            found |= {"mtp.fc": self.projection, "mtp.norm": self.norm}
        found = {f"{name}.weight": tensor for name, tensor in found.items()}
        for number, layer in enumerate(self.layers):
            for name, tensor in layer.state_dict().items():
                found |= self.published(f"mtp.layers.{number}.{name}", tensor)
        return {name: tensor.float().contiguous() for name, tensor in found.items()}

    def published(self, name: str, tensor: Tensor) -> Tensors:
        """Experts in tensors of their own, except those of Qwen3.5."""
        if not name.endswith(("experts.gate_up_proj", "experts.up_proj", "experts.down_proj")) or (
            "qwen3_5" in self.trunk.config.model_type
        ):
            return {name: tensor}
        prefix, kind = name.rsplit(".", 1)
        if kind != "gate_up_proj":
            return {f"{prefix}.{i}.{kind}.weight": one for i, one in enumerate(tensor)}
        halves = [(f"{prefix}.{i}", one.chunk(2)) for i, one in enumerate(tensor)]
        gates = {f"{expert}.gate_proj.weight": gate for expert, (gate, _) in halves}
        return gates | {f"{expert}.up_proj.weight": up for expert, (_, up) in halves}


@pytest.fixture(scope="module")
def made(oracles, tmp_path_factory: pytest.TempPathFactory):
    """A function from a name to the formula and a checkpoint with its tensors."""
    kept: dict[str, tuple[Head, Path]] = {}

    def get(name: str) -> tuple[Head, Path]:
        if name not in kept:
            theirs, source = oracles(SHAPES[name])
            head = Head(theirs)
            directory = shutil.copytree(source, tmp_path_factory.mktemp("mtp") / "hf")
            oracle.edit_weights(directory, lambda tensors: tensors.update(head.tensors()))
            if head.is_nemotron:
                oracle.edit_config(directory, num_nextn_predict_layers=1, mtp_layers_block_type=["attention", "moe"])
            kept[name] = head, directory
        return kept[name]

    return get


def worst(model: nn.Module, head: Head, tokens: list[int]) -> list[float]:
    """Largest error of each depth in units of the tolerance."""
    with torch.inference_mode():
        ours = prediction_logits(model, torch.tensor([tokens]), DEPTHS)
    return [oracle.largest_excess(one[0], two) for one, two in zip(ours, head.logits(tokens), strict=True)]


@pytest.mark.parametrize("name", long_except(["qwen3_next", "qwen3_5", "nemotron_h"], SHAPES))
def test_logits_are_those_of_the_formula(name, made):
    """SP-8: each depth repeats the layer, on the states of the depth before; the trunk's logits stay."""
    head, directory = made(name)
    model = load_hf(directory, READ).model
    tokens = oracle.prompt(40, seed=2)
    assert max(worst(model, head, tokens)) <= 1
    assert excess(model, head.trunk, 40) <= 1
    for wrong in ("enorm", "hnorm", "final_layernorm", "mtp_model_layer.layers.0.input_layernorm"):  # each is seen
        weight = model.mtp.layers[0].get_parameter(f"{wrong}.weight")
        with torch.no_grad():
            weight[3] += 0.5
            assert min(worst(model, head, tokens)) > 1, wrong
            weight[3] -= 0.5


@pytest.mark.parametrize("name", long_except(["qwen3_5_moe", "nemotron_h"], SHAPES))
def test_they_are_saved_and_converted(name, made, tmp_path):
    """SP-8: to a distributed checkpoint and back, bit for bit; without `--save` or a flag they are not read."""
    _, directory = made(name)
    target = tmp_path / "saved"
    loaded = load_model(SourceConfig(load_hf=str(directory), save=str(target), **NULL), {}, device=CPU)
    assert loaded.config.mtp_layer_count == 1
    save_model(target, loaded)
    again = load_model(SourceConfig(load=str(target), **NULL), READ, device=CPU)
    export_hf_checkpoint(tmp_path / "back", again.model, again.config, directory)
    assert_same_files(tmp_path / "back", directory)
    for source in (SourceConfig(load=str(target), **NULL), SourceConfig(load_hf=str(directory), **NULL)):
        served = load_model(source, {}, device=CPU)
        assert (served.model.mtp, served.config.mtp_num_layers) == (None, None)


def test_what_is_refused(made, tmp_path):
    """SP-8: several layers, embeddings of their own, a missing tensor, or flags without such tensors."""
    _, source = made("qwen3_5")
    copied = shutil.copytree(source, tmp_path / "hf")
    for change, message in (
        ({"mtp_num_hidden_layers": 2}, "mtp_num_hidden_layers = 2 is not supported; supported is 1"),
        ({"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings = True"),
    ):
        oracle.edit_config(copied, **change)
        assert load_hf(copied).model.mtp is None
        with pytest.raises(ConfigError, match=message):
            load_hf(copied, READ)
    oracle.edit_config(copied, mtp_use_dedicated_embeddings=False)
    oracle.edit_weights(copied, lambda tensors: tensors.pop("mtp.norm.weight"))
    with pytest.raises(CheckpointError, match=r"lacks mtp\.norm\.weight"):
        load_hf(copied, READ)
    oracle.edit_weights(copied, lambda tensors: [tensors.pop(name) for name in [*tensors] if name.startswith("mtp.")])
    with pytest.raises(ConfigError, match=r"--mtp-num-layers 1 contradicts .*, whose weights are for 0"):
        load_hf(copied, READ)
