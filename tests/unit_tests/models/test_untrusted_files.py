"""SE-1: no code of a model's directory runs, and an unreadable file ends loading at once in one line."""

from __future__ import annotations

import builtins
import json
import os
import shutil
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from megatron_ext.config import ModelConfig, SourceConfig
from megatron_ext.errors import CheckpointError, ConfigError
from megatron_ext.models.build import build_model
from megatron_ext.models.huggingface.hf_checkpoint import load_hf_weights, read_hf_config
from megatron_ext.models.load import load_model
from megatron_ext.models.megatron.directory import model_config
from megatron_ext.models.megatron.dist_checkpoint import resolve_iteration, save_dist_checkpoint
from megatron_ext.models.megatron.training_args import config_from_args
from megatron_ext.models.weight_files import WeightFiles
from megatron_ext.text.tokenizer import TextTokenizer
from tests.unit_tests.models.megatron import megatron_lm
from tests.unit_tests.support.saved_models import load_dist_checkpoint
from tests.unit_tests.text.test_tokenizer import TEXT, byte_level

CPU = torch.device("cpu")


def edit_json(path: Path, edit: Callable[[dict], object]) -> None:
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))


def one_line(error: pytest.ExceptionInfo) -> str:
    text = str(error.value)
    assert text.isprintable()
    assert len(text) < 5000
    return text


# Which module builds the layers


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module that makes a folder when it is imported, and has a stack to offer."""
    folder = tmp_path / "imported"
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "a_stack_of_layers.py").write_text(
        f"import os\nos.makedirs({str(folder)!r}, exist_ok=True)\n"
        "from megatron_ext.mcore.layer_specs import hybrid_stack_spec as stack\n"
    )
    monkeypatch.syspath_prepend(tmp_path / "modules")
    monkeypatch.delitem(sys.modules, "a_stack_of_layers", raising=False)
    return "a_stack_of_layers"


def test_a_checkpoint_names_no_module_to_import(
    module: str, tiny_model: nn.Module, tiny_config: ModelConfig, tmp_path: Path
) -> None:
    """The control: given as a setting the module is imported, and the weights are loaded."""
    directory = tmp_path / "saved"
    save_dist_checkpoint(directory, tiny_model, tiny_config)
    edit_json(directory / "config.json", lambda raw: raw["model"].update(spec=[module, "stack"]))
    message = f"was saved with --spec {module} stack, and a checkpoint's spec is never imported"
    with pytest.raises(CheckpointError, match=message) as caught:
        load_model(SourceConfig(load=str(directory)), {})
    one_line(caught)
    assert not (tmp_path / "imported").exists()
    loaded = load_model(SourceConfig(load=str(directory)), {"spec": (module, "stack")}, device=CPU)
    assert (tmp_path / "imported").exists()
    assert all(torch.equal(a, b) for a, b in zip(loaded.model.parameters(), tiny_model.parameters(), strict=True))


def test_megatrons_own_stack_means_ours(tiny_model: nn.Module, tiny_config: ModelConfig, tmp_path: Path) -> None:
    save_dist_checkpoint(tmp_path, tiny_model, tiny_config)
    spec = ["megatron.core.models.mamba.mamba_layer_specs", "mamba_stack_spec"]
    edit_json(tmp_path / "config.json", lambda raw: raw["model"].update(spec=spec))
    loaded = load_model(SourceConfig(load=str(tmp_path)), {}, device=CPU)
    assert loaded.config == tiny_config
    assert all(torch.equal(a, b) for a, b in zip(loaded.model.parameters(), tiny_model.parameters(), strict=True))


def test_our_own_stack_by_its_name(tiny_config: ModelConfig, tmp_path: Path) -> None:
    named = ModelConfig(**tiny_config.to_dict() | {"spec": ("megatron_ext.mcore.layer_specs", "hybrid_stack_spec")})
    save_dist_checkpoint(tmp_path, build_model(named, device=CPU), named)
    assert load_dist_checkpoint(tmp_path)[1] == named


@pytest.mark.parametrize("spec", [["evil.mamba_layer_specs", "a"], ["os", "system"], "os", [["a"], "b"], 7])
def test_a_spec_in_megatrons_arguments_is_not_imported(spec: object, tiny_config: ModelConfig) -> None:
    with pytest.raises(CheckpointError, match=r"spec = .* is not supported; supported is Megatron's own"):
        config_from_args(megatron_lm.arguments(tiny_config, spec=spec), "common.pt", is_gpt=False)


# Tokenizers


@pytest.fixture
def coded(tmp_path: Path) -> Path:
    """A directory whose tokenizer is a class of its own, which makes a folder when it is imported."""
    directory = tmp_path / "coded"
    directory.mkdir()
    byte_level("<a>").model.save(str(directory))
    (directory / "tokenization_own.py").write_text(
        f"import os\nos.makedirs({str(tmp_path / 'imported')!r}, exist_ok=True)\n"
        "from transformers import GPT2Tokenizer\nclass OwnTokenizer(GPT2Tokenizer):\n    pass\n"
    )
    auto_map = {"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]}
    config = {"tokenizer_class": "OwnTokenizer", "auto_map": auto_map, "unk_token": "<a>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def test_a_tokenizer_runs_no_code_and_does_not_prompt(
    coded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading runs no code and does not prompt; with the answer yes the code would have run."""
    asked = []
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(builtins, "input", lambda *question: asked.append(question) or "y")
    with pytest.raises(ConfigError, match=r"it has custom code \(auto_map\), which is never run") as caught:
        TextTokenizer(coded)
    one_line(caught)
    assert asked == []
    assert not (tmp_path / "imported").exists()


def test_a_class_that_transformers_has_is_taken_instead(coded: Path, tmp_path: Path) -> None:
    edit_json(coded / "tokenizer_config.json", lambda raw: raw.update(tokenizer_class="GPT2Tokenizer"))
    tokenizer = TextTokenizer(coded)
    assert tokenizer.detokenize(tokenizer.tokenize(TEXT)) == TEXT
    assert not (tmp_path / "imported").exists()


def test_a_tokenizers_files_are_read_once(tmp_path: Path) -> None:
    """Later changes in the directory have no effect."""
    byte_level("<a>", "<b>").save(str(tmp_path / "tokenizer.json"))
    template = tmp_path / "chat_template.jinja"
    template.write_text("{{ bos_token }}{{ messages[0]['content'] }}")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<a>"}))
    tokenizer = TextTokenizer(tmp_path)
    for path in tmp_path.iterdir():
        path.unlink()
        os.mkfifo(path)  # to read it would wait for ever
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hello"}]) == "<a>hello"
    assert tokenizer.detokenize(tokenizer.tokenize(TEXT)) == TEXT


# Invalid files


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def make_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def make_cycle(path: Path) -> None:
    path.symlink_to(path.name)


def make_directory(path: Path) -> None:
    path.mkdir()


NOT_FILES = {
    "a named pipe": make_pipe,
    "a device": make_device,
    "symbolic links": make_cycle,
    "a directory": make_directory,
}


def put(directory: Path, name: str, kind: str) -> None:
    (directory / name).unlink(missing_ok=True)
    NOT_FILES[kind](directory / name)


@pytest.mark.parametrize("kind", NOT_FILES)
@pytest.mark.parametrize("name", [".metadata", "common.pt", "metadata.json", "__0_0.distcp"])
def test_files_of_a_distributed_checkpoint(
    name: str, kind: str, tiny_model: nn.Module, tiny_config: ModelConfig, tmp_path: Path
) -> None:
    tensors = megatron_lm.stored_tensors(tiny_model, tiny_config)
    megatron_lm.write(tmp_path, tensors, megatron_lm.arguments(tiny_config))
    put(tmp_path / "iter_0000100", name, kind)
    with pytest.raises(CheckpointError, match=f"{name}: .*{kind}") as caught:
        load_dist_checkpoint(tmp_path / "iter_0000100")
    one_line(caught)


@pytest.mark.parametrize("kind", NOT_FILES)
def test_the_file_that_says_which_iteration(kind: str, tmp_path: Path) -> None:
    (tmp_path / "iter_0000100").mkdir()
    put(tmp_path, "latest_checkpointed_iteration.txt", kind)
    with pytest.raises(CheckpointError, match=kind) as caught:
        resolve_iteration(tmp_path)
    one_line(caught)


@pytest.mark.parametrize("kind", NOT_FILES)
@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "model.safetensors.index.json"])
def test_files_of_a_hugging_face_checkpoint(name: str, kind: str, llama_copy: Path) -> None:
    if name == "model.safetensors.index.json":
        (llama_copy / "model.safetensors").unlink()
    put(llama_copy, name, kind)
    with pytest.raises(CheckpointError, match=f"{name}: .*{kind}") as caught:
        load_model(SourceConfig(load_hf=str(llama_copy)), {}, device=CPU)
    one_line(caught)


@pytest.mark.parametrize("kind", NOT_FILES)
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json", "vocab.json"])
def test_files_of_a_tokenizer(name: str, kind: str, tmp_path: Path) -> None:
    byte_level("<a>").save(str(tmp_path / "tokenizer.json"))
    if name == "vocab.json":
        (tmp_path / "tokenizer.json").unlink()
        byte_level("<a>").model.save(str(tmp_path))
        shutil.copy(tmp_path / "vocab.json", tmp_path / "vocab.txt")  # one that may be read
    put(tmp_path, name, kind)
    if name == "vocab.json" and kind == "a directory":
        return  # of a name that is not checked
    with pytest.raises(ConfigError, match=f"{name}: .*{kind}") as caught:
        TextTokenizer(tmp_path)
    one_line(caught)


def test_links_of_hugging_faces_cache(oracles: Callable, llama_copy: Path, tmp_path: Path) -> None:
    """`snapshots/X/model.safetensors` -> `../../blobs/Y`: read as the files themselves are."""
    blobs, snapshot = tmp_path / "cache" / "blobs", tmp_path / "cache" / "snapshots" / "x"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for index, path in enumerate(sorted(llama_copy.iterdir())):
        path.rename(blobs / str(index))
        (snapshot / path.name).symlink_to(f"../../blobs/{index}")
    linked = load_model(SourceConfig(load_hf=str(snapshot)), {}, device=CPU).model
    direct = load_model(SourceConfig(load_hf=str(oracles("llama")[1])), {}, device=CPU).model
    assert all(torch.equal(a, b) for a, b in zip(linked.parameters(), direct.parameters(), strict=True))


# Weights


def index_of(directory: Path, shard: object) -> None:
    """Say of every tensor that it is in one shard."""
    names = WeightFiles(directory).names
    (directory / "model.safetensors").rename(directory / "moved.safetensors")
    content = {"weight_map": dict.fromkeys(names, shard)}
    (directory / "model.safetensors.index.json").write_text(json.dumps(content))


@pytest.mark.parametrize(
    "shard", ["../hf.safetensors", "/etc/passwd", "..", "", "a/b.safetensors", "a\nb", "a\x00b", 7, None, ["a"]]
)
def test_shards_are_in_the_directory(shard: object, llama_copy: Path) -> None:
    index_of(llama_copy, shard)
    with pytest.raises(CheckpointError, match=r"names the shard .*, which is not a file name") as caught:
        WeightFiles(llama_copy)
    one_line(caught)


def test_a_shard_by_its_name(llama_copy: Path) -> None:
    names = WeightFiles(llama_copy).names
    index_of(llama_copy, "moved.safetensors")
    assert WeightFiles(llama_copy).names == names


def header(size: int | None = None, **tensors: object) -> bytes:
    content = json.dumps(tensors).encode()
    return struct.pack("<Q", len(content) if size is None else size) + content


def tensor(start: int, end: int, *shape: int) -> dict[str, object]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}


HEADERS = {
    "longer than the file": header(10**6, a=tensor(0, 4, 1)) + bytes(4),
    "of 2**63 bytes": header(2**63, a=tensor(0, 4, 1)) + bytes(4),
    "of 2**64 - 1 bytes": header(2**64 - 1),
    "of more than 100 MB": header(101 * 10**6) + bytes(64),
    "that overlaps": header(a=tensor(0, 8, 2), b=tensor(4, 12, 2)) + bytes(12),
    "beyond the end": header(a=tensor(0, 400, 100)) + bytes(8),
    "that ends before it begins": header(a=tensor(8, 0, 2)) + bytes(8),
    "of another length than its shape": header(a=tensor(0, 8, 3)) + bytes(8),
    "whose shape overflows": header(a=tensor(0, 8, 2**40, 2**40)) + bytes(8),
    "with a gap": header(a=tensor(0, 4, 1), b=tensor(8, 12, 1)) + bytes(12),
    "nested deep": struct.pack("<Q", 100_000) + b"[" * 100_000,
    "that is no JSON": struct.pack("<Q", 4) + b"nope",
    "of nothing": b"",
    "of seven bytes": bytes(7),
}


@pytest.mark.parametrize("what", HEADERS)
def test_headers_of_weights(what: str, llama_copy: Path) -> None:
    (llama_copy / "model.safetensors").write_bytes(HEADERS[what])
    config = read_hf_config(llama_copy)
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read: ") as caught:
        load_hf_weights(build_model(config, device=CPU), config, llama_copy)
    one_line(caught)


def test_a_tensor_of_nothing_is_not_split_for_ever(llama_copy: Path) -> None:
    """The tensor's shape has 2**40 experts without any rows, which take no bytes."""
    (llama_copy / "model.safetensors").write_bytes(header(a=tensor(0, 0, 2**40, 0)))
    with pytest.raises(CheckpointError, match=r"tensor a of shape .* is not one of 1099511627776 parts"):
        WeightFiles(llama_copy).split("a", str)


# Configurations

ODD = [
    None, True, -1, 0, 3_000_000, 2**70, 10**400, 0.5, float("nan"), float("inf"), 1e308,
    "", "x" * 100_000, "a\nb\x1b[2J", [], [[]], [{}], [None] * 5, ["x"] * 5000,
    {}, {"a": [1]}, {"__float__": "x"}, {"__float__": [1]},
]  # fmt: skip


def refusal(read: Callable[[], object]) -> str | None:
    """The message of a refusal; None if what was read will do."""
    try:
        read()
    except ConfigError as error:
        return str(error)
    return None


def assert_short_lines(refusals: list[str | None]) -> None:
    given = [text for text in refusals if text is not None]
    assert len(given) > len(refusals) / 4, "the control: most of it makes no sense"
    assert all(text.isprintable() and len(text) < 5000 for text in given)


def test_any_value_of_our_own_configuration(tiny_config: ModelConfig) -> None:
    fields = tiny_config.to_dict()
    assert model_config(fields, "config.json") == tiny_config
    changed = (fields | {name: value} for name in fields for value in ODD)
    assert_short_lines([refusal(lambda fields=fields: model_config(fields, "config.json")) for fields in changed])


@pytest.mark.parametrize("is_gpt", [False, True])
def test_any_value_of_the_arguments(is_gpt: bool, tiny_config: ModelConfig) -> None:
    arguments = vars(megatron_lm.gpt_arguments(megatron_lm.GPT) if is_gpt else megatron_lm.arguments(tiny_config))
    assert config_from_args(arguments, "common.pt", is_gpt=is_gpt).layer_count > 0
    names = (*arguments, "linear_attention_freq", "moe_router_load_balancing_type", "mtp_num_layers", "softmax_type")
    changed = (arguments | {name: value} for name in names for value in ODD)
    refused = [refusal(lambda args=args: config_from_args(args, "common.pt", is_gpt=is_gpt)) for args in changed]
    assert_short_lines(refused)
