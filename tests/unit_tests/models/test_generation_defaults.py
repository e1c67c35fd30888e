"""SA-8: a model's own sampling defaults: what of them is taken, what decides over them, and where they hold."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from arguments.parser import parse_arguments, parse_server_arguments
from megatron_ext import load_engine
from megatron_ext.config import RequestParams, SourceConfig
from megatron_ext.config.differences import EMBEDDED_MODEL_DIR
from megatron_ext.errors import ConfigError
from megatron_ext.mcore import platform
from megatron_ext.models.generation_defaults import generation_defaults, request_defaults
from megatron_ext.server.run import build_serving

FILE = {
    "do_sample": True,
    "temperature": 0.8,
    "top_k": 7,
    "top_p": 0.9,
    "repetition_penalty": 1.3,
    "max_new_tokens": 999,
}
TAKEN = {"temperature": 0.8, "top_k": 7, "top_p": 0.9, "repetition_penalty": 1.3}


def directory(tmp_path: Path, content: object = FILE) -> Path:
    (tmp_path / "generation_config.json").write_text(json.dumps(content))
    return tmp_path


def taken(tmp_path: Path, content: object, **source: object) -> dict:
    settings = {"load_hf": str(directory(tmp_path, content)), "generation_config": "auto"} | source
    return dict(generation_defaults(SourceConfig(**settings)))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (FILE, TAKEN),
        ({"do_sample": True, "top_p": None}, {"temperature": 1.0}),
        ({"do_sample": False, "temperature": 0.6}, {"temperature": 0.0}),
        ({"eos_token_id": [1, 2], "min_p": 0.1}, {"min_p": 0.1}),
        ({"top_k": -1, "temperature": 0.5}, {"top_k": 0, "temperature": 0.5}),
        ({}, {}),
    ],
    ids=str,
)
def test_defaults_of_the_file(tmp_path, content, expected):
    assert taken(tmp_path, content) == expected
    assert taken(tmp_path, content, generation_config="none") == {}


def test_the_server_takes_them_by_default(tmp_path, caplog):
    """The default elsewhere is none; a server also takes the longest answer, and says what it took."""
    caplog.set_level("INFO")
    for no_file in (SourceConfig(load_hf=str(tmp_path), generation_config="auto"), SourceConfig()):
        assert generation_defaults(no_file, on_server=True) == {}
    caplog.clear()
    source = SourceConfig(load_hf=str(directory(tmp_path)))
    assert generation_defaults(source) == {}
    assert caplog.text == ""
    assert generation_defaults(source, on_server=True) == TAKEN | {"num_tokens_to_generate": 999}
    (line,) = [record.getMessage() for record in caplog.records]
    taken = "temperature 0.8, top_k 7, top_p 0.9, repetition_penalty 1.3, num_tokens_to_generate 999"
    assert line == f"sampling defaults from {tmp_path / 'generation_config.json'}: {taken}"
    assert generation_defaults(dataclasses.replace(source, generation_config="none"), on_server=True) == {}


@pytest.mark.parametrize("content", [{"temperature": -1}, {"top_k": "many"}, {"top_p": 2}], ids=str)
def test_values_that_cannot_work_name_the_file(tmp_path, content):
    with pytest.raises(ConfigError, match=rf"generation_config\.json: {next(iter(content))}"):
        taken(tmp_path, content)


def test_flags_decide_over_them(tmp_path):
    """Flags override the file's defaults, even a flag that equals the package's default."""
    flags = ["--load-hf", str(directory(tmp_path)), "--generation-config", "auto", "--temperature", "0", "--top_k", "3"]
    settings = parse_arguments(flags)
    params = request_defaults(settings.source, settings.sampling_given)
    assert params == RequestParams(**TAKEN | {"temperature": 0.0, "top_k": 3})
    assert settings.sampling == RequestParams(temperature=0.0, top_k=3)


def test_a_server_that_is_started_with_them(tmp_path):
    """SA-8: without a flag."""
    platform.initialize()
    for file in EMBEDDED_MODEL_DIR.glob("*"):
        if file.is_file():
            shutil.copy(file, tmp_path)
    flags = ["--load-hf", str(directory(tmp_path)), "--inference-dynamic-batching-block-count", "8"]
    serving = build_serving(parse_server_arguments([*flags, "--inference-dynamic-batching-max-requests", "2"]))
    assert serving.defaults == TAKEN | {"num_tokens_to_generate": 999}
    serving.engine.close()


def test_a_model_that_is_loaded_with_them(tmp_path):
    """The tokens are those of a request that says the same; without `auto` they are greedy."""
    for file in EMBEDDED_MODEL_DIR.iterdir():
        if file.is_file():
            shutil.copy(file, tmp_path)
    directory(tmp_path)
    pools = {"inference_dynamic_batching_block_count": 40, "inference_dynamic_batching_prefix_caching_mamba_slots": 4}
    outputs = {}
    for choice in ("auto", "none"):
        with load_engine(load_hf=str(tmp_path), generation_config=choice, num_tokens_to_generate=12, **pools) as engine:
            said = RequestParams(num_tokens_to_generate=12, **TAKEN)
            greedy = RequestParams(num_tokens_to_generate=12)
            # the seed of a request that says none depends on its number: it is the first one in each engine
            outputs[choice] = engine.generate("def mean(values):")[0].generated_tokens
            if choice == "none":
                assert outputs[choice] == engine.generate("def mean(values):", greedy)[0].generated_tokens
    with load_engine(load_hf=str(tmp_path), **pools) as engine:
        assert outputs["auto"] == engine.generate("def mean(values):", said)[0].generated_tokens
    assert outputs["auto"] != outputs["none"]
