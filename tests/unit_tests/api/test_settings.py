"""PY-2: `load_engine` takes what the command line takes, by name, and refuses as it does."""

from __future__ import annotations

import dataclasses

import pytest

from arguments import parse_arguments
from arguments.groups import GROUPS
from arguments.megatron.flag_table import records
from arguments.megatron.synonyms import SYNONYMS
from arguments.parser import build_parser
from megatron_ext import ConfigError, load_engine
from megatron_ext.api.loading import is_of_the_engine, known_names, read_settings
from megatron_ext.config import InferenceSettings, RunConfig
from megatron_ext.config.request import ResponseFormat, TokenBiases
from megatron_ext.config.source import HfOverrides

FLAGS = [flag for group in (*GROUPS, SYNONYMS) for flag in group.flags]
OF_THE_RUN = {field.name for field in dataclasses.fields(RunConfig)} - {"inference_logging_step_interval"}
# For each kind of field a value, as typed and as Python's.
VALUES = {
    bool: ("", True),
    int: ("2", 2),
    float: ("2.5", 2.5),
    str: ("x", "x"),
    TokenBiases: ('{"2": 2.5}', {2: 2.5}),
    HfOverrides: ('{"a": null}', {"a": None}),
    ResponseFormat: ('{"type": "json_object"}', {"type": "json_object"}),
}


def settings_or_error(read) -> InferenceSettings | str:
    try:
        return read()
    except ConfigError as error:
        return str(error)


def spelled(option: str) -> str:
    return option.lstrip("-").replace("-", "_")


def test_every_flag_has_its_name():
    """PY-2: the parser's options are walked, so that no list of names has to be kept."""
    options = {o for action in build_parser()._actions for o in action.option_strings} - {"-h", "--help"}
    settings = {option for option in options if not option.startswith("--no-")} - {flag.name for flag in records()}
    assert len(settings) > 100
    assert {spelled(option) for option in settings} <= set(known_names())


@pytest.mark.parametrize("flag", FLAGS, ids=[flag.option for flag in FLAGS])
def test_each_setting_means_the_same_as_its_flag(flag):
    """PY-2: the settings are equal, by the flag's name and by its field's; what is of the run is refused."""
    kind, choices = flag.kind, flag.declared.choices
    typed, value = (choices[0], choices[0]) if choices else VALUES[kind.item]
    words = [flag.option, *([typed] if typed else [])]
    if kind.is_tuple:
        count = kind.length or 1
        words, value = [flag.option, *[typed] * count], [value] * count
    if not is_of_the_engine(flag):
        assert flag.field in OF_THE_RUN
        with pytest.raises(ConfigError, match=f"^{spelled(flag.option)} is a setting of megatron-ext run only"):
            read_settings({spelled(flag.option): value})
        return
    expected = settings_or_error(lambda: parse_arguments(words))
    for name in {spelled(flag.option), flag.field, *map(spelled, flag.names)}:
        assert settings_or_error(lambda: read_settings({name: value})) == expected, name  # noqa: B023


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"laod_hf": "x"}, "laod_hf is not a setting of an engine; did you mean load_hf?"),
        ({"max_request": 3}, "did you mean max_requests?"),
        ({"zzzzzz": 3}, "zzzzzz is not a setting of an engine; megatron-ext run --help=all lists the names"),
        ({"block_size": "64"}, "block_size '64' is not a whole number"),
        ({"bf16": 1}, "bf16 1 is not true or false"),
        ({"seed": None}, "seed None is not a whole number"),
        ({"stop_words": "a"}, "stop_words 'a' is not a list of texts"),
        ({"eviction_policy": "fifo"}, "eviction_policy 'fifo' is unknown; one of lru, ref_zero"),
        ({"temperature": -1.0}, "temperature -1.0 must be zero (greedy) or more"),
        ({"load": "a", "load_hf": "b"}, "--load a and --load-hf b contradict each other; give one of them"),
        ({"block_size": 16, "inference_dynamic_batching_block_size": 16}, "is given twice, as block_size too"),
        ({"prompts": ["a"]}, "prompts is a setting of megatron-ext run only; leave it out"),
        ({"load": "/nowhere/at/all"}, "--load /nowhere/at/all does not exist; give the directory of a checkpoint"),
        ({"tokenizer_model": "/nowhere"}, "tokenizer /nowhere does not exist; give a directory or a tokenizer.json"),
        (
            {"inference_dynamic_batching_buffer_size_gb": 1e9},
            "GB of memory are free for this process; give --inference-dynamic-batching-buffer-size-gb",
        ),
    ],
)
def test_refused_in_one_line(settings, message):
    """PY-2: the setting, its value, and a remedy."""
    with pytest.raises(ConfigError) as caught:
        load_engine(**settings)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_of_flags_stands_below(tmp_path):
    """PY-2: keyword > YAML file, and the file may not say what only a run does."""
    path = tmp_path / "flags.yaml"
    path.write_text("temperature: 0.5\nnum-tokens-to-generate: 3\n")
    settings = read_settings({"model_config": path, "temperature": 0.25})
    assert (settings.sampling.temperature, settings.sampling.num_tokens_to_generate) == (0.25, 3)
    path.write_text("prompt-file: x\n")
    with pytest.raises(ConfigError, match=r"^prompt_file in the file that model_config names is a setting of"):
        read_settings({"model_config": path})
