"""MF-2: YAML files of Megatron's functional tests are read as they are."""

from __future__ import annotations

import pytest

from arguments import parse_arguments
from arguments.megatron.yaml_form import EXPORTED
from megatron_ext.errors import ConfigError

WHOLE = """\
ENV_VARS:
  CUDA_DEVICE_MAX_CONNECTIONS: 1
  NCCL_ALGO: Ring
  CUBLAS_WORKSPACE_CONFIG: :4096:8
  SOME_PLUGIN: ${ROOT}/x.so
TEST_TYPE: frozen-start
MODE: inference
MODEL_ARGS:
  --load: ${ROOT}/model
  --bf16: true
  --init-method-std: 0.0198
  --init-method-std: 0.014
  --norm-epsilon: 1e-3
  --num-workers:
  --temperature: 1.0
  --top_k: 1
  --top_k: 2 # the last one wins
  --prompts: "Time travel   to '2008'"
  --stop-words: '[the and]'
  --spec: megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec
  --inference-dynamic-batching-enable-prefix-caching: true
  --no-use-tokenizer-model-from-checkpoint-args: true
  --incoming-requests-per-sec: -1
  --cuda-graph-scope: [attn mamba]
METRICS:
  - "generated_tokens"
LAUNCHER: torchrun
"""


@pytest.fixture
def parse_yaml(tmp_path, monkeypatch):
    """A function: what a file of that text, and flags, give."""
    monkeypatch.setenv("ROOT", "/data")

    def parse(text: str, *argv: str):
        path = tmp_path / "model_config.yaml"
        path.write_text(text)
        return parse_arguments(["--model-config", str(path), *argv])

    return parse


@pytest.fixture
def refusal(parse_yaml, tmp_path):
    def refuse(text: str, *argv: str) -> str:
        with pytest.raises(ConfigError) as caught:
            parse_yaml(text, *argv)
        message = str(caught.value).replace(str(tmp_path / "model_config.yaml"), "FILE")
        assert "\n" not in message
        return message

    return refuse


def test_a_whole_file(parse_yaml):
    settings = parse_yaml(WHOLE)
    assert settings.source.load == "/data/model"
    assert settings.source.bf16
    assert not settings.source.use_tokenizer_model_from_checkpoint_args
    assert settings.model_overrides == {"norm_epsilon": 1e-3}
    assert (settings.sampling.temperature, settings.sampling.top_k) == (1.0, 2)
    assert settings.run.prompts == ("Time travel to 2008",)
    assert settings.sampling.stop_words == ("the", "and")
    assert settings.cache.enable_prefix_caching
    assert settings.run.arrival_rate is None
    assert dict(settings.start.environment) == {
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "NCCL_ALGO": "Ring",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    }
    (line,) = settings.start.lines
    assert line.endswith(": SOME_PLUGIN (export it yourself), --init-method-std, --cuda-graph-scope")


def test_a_flag_on_the_command_line_decides(parse_yaml):
    settings = parse_yaml(WHOLE, "--top_k", "9", "--load", "other")
    assert (settings.sampling.top_k, settings.source.load) == (9, "other")


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ("--prompts: one text", ("one text",)),
        ("--prompts: '\"the\"'", ("the",)),
        ("--prompts: it's odd", ("it's odd",)),
        ("--prompts: [two words]", ("two", "words")),
        ("--prompts: [two, words]", ("two", "words")),
        ("--prompts: -1 is no flag", ("-1 is no flag",)),
        ("--prompts: --seed", ("--seed",)),
        ('--prompts: "yes"', ("yes",)),
        ("--prompts: yes", ("yes",)),
        ("--prompts: ''", ()),
        ("--prompts: |\n    two\n    lines", ("two lines",)),
        ("--prompts: 2001-02-03", ("2001-02-03",)),
    ],
)
def test_texts(parse_yaml, entry, expected):
    assert parse_yaml(f"MODEL_ARGS:\n  {entry}\n").run.prompts == expected


@pytest.mark.parametrize("word", ["true", "True", "TRUE", '"true"'])
def test_true_is_the_flag_alone(parse_yaml, word):
    assert parse_yaml(f"MODEL_ARGS:\n  --bf16: {word}\n").source.bf16


@pytest.mark.parametrize("value", ["", " null", " ~", " ''"])
def test_empty_is_dropped(parse_yaml, value):
    assert parse_yaml(f"MODEL_ARGS:\n  --bf16:{value}\n  --top_k:{value}\n") == parse_yaml("MODEL_ARGS: {}\n")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("MODEL_ARGS:\n  --load: ${NOWHERE}/x\n", "FILE, line 2: --load: ${NOWHERE} is not set in the environment"),
        ("ENV_VARS:\n  NCCL_ALGO: ${NOWHERE}\n", "FILE, line 2: NCCL_ALGO: ${NOWHERE} is not set"),
        ("MODEL_ARGS:\n  --bf16: false\n", "FILE, line 2: --bf16: false is not a value of a flag; leave the key out"),
        ("MODEL_ARGS:\n  --bf16: 1\n", "FILE, line 2: argument --bf16/--no-bf16: ignored explicit argument '1'"),
        (
            "MODEL_ARGS:\n\n  --hiden-size: 8\n",
            "FILE, line 3: unrecognized arguments: --hiden-size=8; did you mean ",
        ),
        ("MODEL_ARGS:\n  seed: 8\n", "FILE, line 2: 'seed' is not a flag that the file may contain"),
        ("MODEL_ARGS:\n  --help: true\n", "FILE, line 2: '--help' is not a flag that the file may contain"),
        ("MODEL_ARGS:\n  --model-config: a.yaml\n", "'--model-config' is not a flag that the file may contain"),
        ("MODEL_ARGS:\n  --seed: {a: 1}\n", "FILE, line 2: --seed: a mapping is not a value of a flag"),
        ("MODEL_ARGS:\n  --seed: [[1]]\n", "FILE, line 2: nesting is deeper than a list of values"),
        ("MODEL_ARGS: [1]\n", "FILE, line 1: MODEL_ARGS is not a mapping of names to values"),
        ("MODEL_ARGS:\n  --top_k: many\n", "FILE, line 2: argument --top_k: 'many' is not a whole number"),
        (
            "MODEL_ARGS: {}\nMODEL_ARGS_2:\n  --seed: 1\n",
            "FILE, line 2: MODEL_ARGS_2 is refused: it has the flags of a",
        ),
        (
            "BEFORE_SCRIPT: rm -rf x\n",
            "FILE, line 1: BEFORE_SCRIPT is refused: it is a shell script, and a file",
        ),
        ("MODEL_ARGS: {}\nAFTER_SCRIPT: ls\n", "FILE, line 2: AFTER_SCRIPT is refused: it is a shell script"),
        ("MODE: pretraining\n", "FILE, line 1: MODE 'pretraining' is refused: only 'inference' runs here"),
        (
            "MODEL_ARGS: {}\nMODEL_ARG: {}\n",
            "'MODEL_ARG' is not a key of a file with MODEL_ARGS; did you mean",
        ),
        (
            "MODEL_ARGS: {}\nseed: 1\n",
            "FILE, line 2: 'seed' is not a key of a file with MODEL_ARGS; flags belong under",
        ),
    ],
)
def test_refused(refusal, text, expected):
    assert expected in refusal(text)


def test_a_script_that_is_null_is_none(parse_yaml):
    parse_yaml("MODEL_ARGS: {}\nBEFORE_SCRIPT:\nAFTER_SCRIPT: null\n")


def test_only_variables_that_load_nothing_are_exported():
    """SE-1: a file runs no code, and names no library to load."""
    assert not [name for name in EXPORTED if any(part in name for part in ("PATH", "PLUGIN", "PRELOAD", "PYTHON_"))]
