"""PY-6, SE-5: new weights from a directory below a root equal those of loading it, or nothing changes."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from megatron_ext.config import SourceConfig
from megatron_ext.errors import ConfigError
from megatron_ext.mcore.checkpoint.weight_shards import model_tensors
from megatron_ext.models.build import build_model
from megatron_ext.models.load import load_model
from megatron_ext.models.megatron.dist_checkpoint import save_dist_checkpoint
from megatron_ext.models.update.disk import WeightsRoot, read_new_weights
from megatron_ext.models.weight_files import WEIGHTS_FILE
from tests.unit_tests.models.megatron import megatron_lm

CPU = torch.device("cpu")
NULL = {"tokenizer_type": "NullTokenizer"}


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model_tensors(model).items()}


def are_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture
def source(tiny_model, tiny_config, tmp_path) -> SourceConfig:
    save_dist_checkpoint(tmp_path / "old", tiny_model, tiny_config)
    return SourceConfig(load=str(tmp_path / "old"), **NULL)


class TestWhatIsRead:
    def test_a_checkpoint_of_ours(self, source, tiny_config, tmp_path):
        """PY-6: bitwise, and only when it is written."""
        new = build_model(tiny_config, device=CPU, seed=8)
        save_dist_checkpoint(tmp_path / "new", new, tiny_config)
        loaded = load_model(source, {}, device=CPU)
        before = tensors_of(loaded.model)
        read = read_new_weights(loaded, source, {}, tmp_path / "new")
        assert are_equal(tensors_of(loaded.model), before)
        read.write()
        assert are_equal(tensors_of(loaded.model), tensors_of(new))
        assert not are_equal(before, tensors_of(new))  # the control

    @pytest.mark.parametrize("name", ["llama", "llama, tied"])
    def test_a_hugging_face_checkpoint(self, oracles, tmp_path, name):
        """PY-6: tensors joined, split or shifted on the way equal those of loading."""
        old = oracles(name)[1]
        new = shutil.copytree(old, tmp_path / "new")
        weights = load_file(old / WEIGHTS_FILE)
        save_file({key: one * 1.5 for key, one in weights.items()}, new / WEIGHTS_FILE, metadata={"format": "pt"})
        source = SourceConfig(load_hf=str(old), **NULL)
        loaded = load_model(source, {}, device=CPU)
        read_new_weights(loaded, source, {}, new).write()
        expected = load_model(SourceConfig(load_hf=str(new), **NULL), {}, device=CPU)
        assert are_equal(tensors_of(loaded.model), tensors_of(expected.model))


class TestRefusedWhole:
    """SE-5: the message names what does not fit, and the model is what it was."""

    def check(self, source: SourceConfig, directory: Path, *named: str) -> None:
        loaded = load_model(source, {}, device=CPU)
        before = tensors_of(loaded.model)
        with pytest.raises(ConfigError) as caught:
            read_new_weights(loaded, source, {}, directory)
        assert all(part in str(caught.value) for part in named), caught.value
        assert are_equal(tensors_of(loaded.model), before)

    @pytest.mark.parametrize("change", ["missing", "unknown", "shape", "type"])
    def test_tensors_that_do_not_fit(self, source, tmp_path, change):
        new = Path(shutil.copytree(source.load, tmp_path / "new"))
        name = "embedding.word_embeddings.weight"
        changes = {
            "missing": lambda tensors: tensors.pop(name),
            "unknown": lambda tensors: tensors.update({"x.weight": tensors[name] + 0}),
            "shape": lambda tensors: tensors.update({name: tensors[name].flatten()}),
            "type": lambda tensors: tensors.update({name: tensors[name].long()}),
        }
        megatron_lm.edit_tensors(new, changes[change])
        self.check(source, new, "x.weight" if change == "unknown" else name)

    def test_equal_shapes_of_another_model(self, source, tiny_model, tiny_config, tmp_path):
        other = dataclasses.replace(tiny_config, norm_epsilon=1e-3)
        save_dist_checkpoint(tmp_path / "new", tiny_model, other)
        self.check(source, tmp_path / "new", "norm_epsilon", "0.001")

    def test_a_distributed_file_that_ends_early(self, source, tiny_config, tmp_path):
        """Found while it is read, when others of its tensors have been."""
        new = build_model(tiny_config, device=CPU, seed=8)
        save_dist_checkpoint(tmp_path / "new", new, tiny_config)
        shard = max((tmp_path / "new").glob("*.distcp"), key=lambda file: file.stat().st_size)
        os.truncate(shard, shard.stat().st_size // 2)
        self.check(source, tmp_path / "new", shard.name)

    def test_no_configuration(self, source, tmp_path):
        (tmp_path / "new").mkdir()
        (tmp_path / "new" / WEIGHTS_FILE).touch()
        self.check(source, tmp_path / "new", "config.json")

    def test_a_checkpoint_with_other_digests(self, source, tmp_path):
        """A manifest of SHA-256 digests is verified before anything is read."""
        shutil.copytree(source.load, tmp_path / "new")
        manifest = {"algorithm": "sha256", "files": {"__0_0.distcp": "0" * 64}}
        (tmp_path / "new" / "integrity.json").write_text(json.dumps(manifest))
        self.check(source, tmp_path / "new", "__0_0.distcp is damaged")


class TestTheRoot:
    @pytest.fixture
    def root(self, tmp_path) -> WeightsRoot:
        (tmp_path / "root" / "inside").mkdir(parents=True)
        (tmp_path / "outside").mkdir()
        (tmp_path / "root-beside").mkdir()
        (tmp_path / "outside" / "secret").write_text("secret")
        return WeightsRoot.of(str(tmp_path / "root"))

    def test_below_it(self, root):
        for asked in ("inside", "./inside/../inside", str(root.path / "inside")):
            assert root.resolve(asked) == root.path / "inside"
        (root.path / "link").symlink_to(root.path / "inside")
        assert root.resolve("link") == root.path / "inside"

    @pytest.mark.parametrize(
        "asked", ["../outside", "inside/../../outside", "/", "/etc", "../root-beside", "../missing"]
    )
    def test_elsewhere(self, root, asked):
        """SE-5: the refusal does not reveal whether the path exists."""
        with pytest.raises(ConfigError, match="not below --weights-root"):
            root.resolve(asked)

    def test_links_out(self, root, tmp_path):
        """SE-5: links are refused for the directory, for one above it, and for any file in it."""
        (root.path / "out").symlink_to(tmp_path / "outside")
        (root.path / "up").symlink_to(tmp_path)
        (root.path / "inside" / "latest_checkpointed_iteration.txt").symlink_to(tmp_path / "outside" / "secret")
        for asked in ("out", "up/outside", "inside"):
            with pytest.raises(ConfigError, match="not below --weights-root") as caught:
                root.resolve(asked)
            assert "secret" not in str(caught.value)

    def test_links_out_of_an_iteration(self, root, tmp_path):
        """TE-6: links are refused for files of the iteration too, not only for those above it."""
        (root.path / "inside" / "latest_checkpointed_iteration.txt").write_text("100")
        iteration = root.path / "inside" / "iter_0000100"
        iteration.mkdir()
        assert root.resolve("inside") == iteration
        (iteration / "common.pt").symlink_to(tmp_path / "outside" / "secret")
        with pytest.raises(ConfigError, match="not below --weights-root"):
            root.resolve("inside")

    @pytest.mark.parametrize("asked", ["", "a\0b", "missing", "x" * 300, "inside/file", "\ud800"])
    def test_no_directory(self, root, asked):
        (root.path / "inside" / "file").write_text("")
        with pytest.raises(ConfigError):
            root.resolve(asked)

    def test_a_root_that_is_none(self, tmp_path):
        with pytest.raises(ConfigError, match=r"--weights-root .*missing is not a directory"):
            WeightsRoot.of(str(tmp_path / "missing"))
