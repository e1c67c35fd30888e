"""FA-2: the `config.json` of published folders translates as it is; fields that nothing knows are a warning."""

from __future__ import annotations

import itertools
import json
import logging
from pathlib import Path

import pytest
import yaml
from transformers import AutoConfig

from arguments.parser import parse_arguments
from megatron_ext import load_engine
from megatron_ext.config import SourceConfig
from megatron_ext.config.differences import EMBEDDED_MODEL_DIR
from megatron_ext.errors import ConfigError
from megatron_ext.models.huggingface.family_registry import FAMILIES, family_of
from megatron_ext.models.huggingface.hf_checkpoint import read_hf_config, translate
from megatron_ext.models.load import load_model
from tests.unit_tests.models.huggingface.test_families import PUBLISHED

FILE = Path(__file__).with_name("published_configs.yaml")


def with_layers(raw: dict) -> dict:
    """Return the fields with each `layer_types` written out, also in the text model inside."""
    nested = {name: with_layers(value) for name, value in raw.items() if name == "text_config"}
    if not isinstance(raw.get("layer_types"), list):
        return raw | nested
    period = [kind for count, kind in raw["layer_types"] for _ in range(count)]
    return raw | nested | {"layer_types": list(itertools.islice(itertools.cycle(period), raw["num_hidden_layers"]))}


FOLDERS = {name: with_layers(raw) for name, raw in yaml.safe_load(FILE.read_text("utf-8")).items()}
LLAMA = FOLDERS["Llama-3.2-1B-Instruct"]
UNKNOWN = {"colour": "red", "attention_sinks": 4, "_private": 1, "empty": [], "other_token_id": 5}


@pytest.mark.parametrize("raw", [*FOLDERS.values(), *PUBLISHED.values()], ids=[*FOLDERS, *PUBLISHED])
def test_published_folders_translate(raw: dict) -> None:
    config = translate(raw)
    text = raw.get("text_config", raw)
    sizes = {config.hidden_size, config.vocab_size}
    assert sizes == {text.get("hidden_size", text.get("block_dim", text.get("d_model"))), text["vocab_size"]}
    assert config.layer_count % text.get("num_hidden_layers", config.layer_count) == 0
    assert family_of(raw).unknown_fields(raw) == []


@pytest.mark.parametrize("name", FAMILIES)
def test_every_field_of_transformers_is_decided_on(name: str) -> None:
    """A field that a later transformers adds must be translated, fixed or harmless by name, not overlooked."""
    raw = AutoConfig.for_model(name).to_dict()
    assert family_of(raw).unknown_fields(raw) == []


def test_many_folders_of_every_kind() -> None:
    assert len(FOLDERS) + len(PUBLISHED) >= 40
    kinds = [raw["model_type"] for raw in (*FOLDERS.values(), *PUBLISHED.values())]
    assert set(kinds) == set(FAMILIES)
    for origin in ("(Unsloth)", "(transformers.js)", "(from GGUF)"):
        assert sum(origin in name for name in FOLDERS) >= 2


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_unknown_fields_are_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | UNKNOWN))
    for _ in range(2):
        assert read_hf_config(tmp_path) == translate(LLAMA)
    (line,) = warnings_of(caplog)
    assert line.endswith("config.json: unknown fields, which are ignored: attention_sinks, colour")


def test_fields_above_those_of_the_text_model_are_named() -> None:
    """`--hf-overrides` there would have no effect."""
    raw = FOLDERS["Qwen3.5-27B"]
    changes = {"hidden_size": 64, "vocab_size": raw["text_config"]["vocab_size"], "colour": "red"}
    assert family_of(raw).unknown_fields(raw | changes) == ["colour", "hidden_size"]


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("Llama-3.2-1B-Instruct", {"sliding_window": 4096}, "sliding_window = 4096 is not supported"),
        ("Qwen2.5-7B-Instruct", {"dual_chunk_attention_config": {"chunk_size": 8}}, "dual_chunk_attention_config = "),
        ("Qwen3.5-27B", {"quantization_config": {"quant_method": "modelopt"}}, "quantization_config = "),
        ("Qwen3-0.6B", {"quantization": {"bits": 4, "group_size": 64}}, "quantization = "),
        ("Qwen3-0.6B", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "slope": 2}}, "rope_scaling.slope = 2"),
    ],
)
def test_fields_that_change_logits_stay_errors(name: str, changes: dict, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        translate(FOLDERS[name] | changes)


def test_a_model_with_overrides(tmp_path: Path) -> None:
    """The changed file decides on fields, family and weights, on the command line and in Python."""
    for file in EMBEDDED_MODEL_DIR.glob("*"):
        if file.is_file() and file.name != "config.json":
            (tmp_path / file.name).symlink_to(file)
    raw = json.loads((EMBEDDED_MODEL_DIR / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"model_type": "llama", "quantization_config": {"bits": 4}}))
    changes = {"model_type": raw["model_type"], "quantization_config": None, "max_position_embeddings": 333}
    settings = parse_arguments(["--load-hf", str(tmp_path), "--hf-overrides", json.dumps(changes)])
    assert load_model(settings.source, {}).config.max_position_embeddings == 333
    pools = {"inference_dynamic_batching_block_count": 20, "inference_dynamic_batching_prefix_caching_mamba_slots": 2}
    with load_engine(load_hf=str(tmp_path), hf_overrides=changes, num_tokens_to_generate=2, **pools) as engine:
        assert engine.generate("def f():")[0].generated_tokens
    with pytest.raises(ConfigError, match="architectures"):
        load_model(SourceConfig(load_hf=str(tmp_path)), {})
