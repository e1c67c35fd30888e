"""MF-2: flag > YAML file > configuration saved with the checkpoint > default."""

from __future__ import annotations

import pytest

from arguments import parse_arguments
from megatron_ext.config import BatchingConfig, ParallelConfig, RequestParams, RunConfig, SourceConfig
from megatron_ext.errors import ConfigError


@pytest.fixture
def yaml_file(tmp_path):
    def write(text: str) -> str:
        path = tmp_path / "flags.yaml"
        path.write_text(text)
        return str(path)

    return write


def test_defaults_are_those_of_the_dataclasses():
    arguments = parse_arguments([])
    assert arguments.source == SourceConfig()
    assert arguments.model_overrides == {}
    assert arguments.parallel == ParallelConfig()
    assert arguments.sampling == RequestParams()
    assert arguments.batching == BatchingConfig()
    assert arguments.run == RunConfig()


def test_flag_over_yaml_over_default(yaml_file):
    path = yaml_file("top_k: 5\ninference-dynamic-batching-block-size: 16\nseed: 7\n")
    arguments = parse_arguments(["--model-config", path, "--top_k", "9"])
    assert arguments.sampling.top_k == 9
    assert arguments.batching.block_size == 16
    assert arguments.source.seed == 7
    assert arguments.sampling.num_tokens_to_generate == RequestParams().num_tokens_to_generate


def test_a_flag_equal_to_the_default_still_decides(yaml_file):
    path = yaml_file("bf16: true\ninference-dynamic-batching-block-size: 16\n")
    arguments = parse_arguments(
        ["--model-config", path, "--inference-dynamic-batching-block-size", "64", "--no-bf16"],
    )
    assert arguments.batching.block_size == 64
    assert arguments.source.bf16 is False


def test_only_given_flags_override_a_checkpoint(yaml_file):
    """A checkpoint's configuration must win over defaults, so defaults may not look like something given."""
    path = yaml_file("max-position-embeddings: 128\n")
    arguments = parse_arguments(["--load", "somewhere", "--model-config", path, "--vocab-size", "64"])
    assert arguments.model_overrides == {"max_position_embeddings": 128, "vocab_size": 64}


def test_yaml_values_of_every_kind(yaml_file):
    path = yaml_file(
        """
spec: [a.module, a_name]
hybrid_override_pattern: "M-*-"
squared-relu: true
disable_bias_linear: false
temperature: 1e-1
stop-words: ["\\n\\n", End]
prompts: [one, "two"]
drain-between-batches: true
batch_boundaries: [0, 1]
"""
    )
    arguments = parse_arguments(["--model-config", path])
    assert arguments.model_overrides == {
        "spec": ("a.module", "a_name"),
        "hybrid_override_pattern": "M-*-",
        "squared_relu": True,
        "disable_bias_linear": False,
    }
    assert arguments.sampling.temperature == 0.1
    assert arguments.sampling.stop_words == ("\n\n", "End")
    assert arguments.run.prompts == ("one", "two")
    assert arguments.run.batch_boundaries == (0, 1)


def test_flags_of_every_kind():
    arguments = parse_arguments(
        "--spec m n --prompts a b --stop-words x --batch-boundaries 0,2 --drain-between-batches --top_p 0.5".split()
    )
    assert arguments.model_overrides == {"spec": ("m", "n")}
    assert arguments.run.prompts == ("a", "b")
    assert arguments.run.batch_boundaries == (0, 2)
    assert arguments.sampling.stop_words == ("x",)
    assert arguments.sampling.top_p == 0.5


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hiden-size: 8\n", ("line 1", "'hiden-size'", "did you mean 'hidden-size'?")),
        ("seed: 1\nmodel-config: other.yaml\n", ("line 2", "'model-config'")),
        ("num-layers: 2\nnum_layers: 3\n", ("line 2", "'num_layers'", "twice")),
        ("num-layers: many\n", ("num-layers", "'many' is not a whole number")),
        ("num-layers:\n", ("None is not one value",)),
        ("stop-words: x\n", ("'x' is not a list",)),
        ("spec: [a]\n", ("is not a list of two",)),
        ("normalization: Batch\n", ("'Batch' is unknown", "RMSNorm, LayerNorm")),
        ("- seed\n", ("not a mapping",)),
        ("seed: [1\n", ("line 2", "not YAML")),
    ],
)
def test_bad_yaml(yaml_file, one_line_error, text, expected):
    message = one_line_error("--model-config", yaml_file(text))
    for part in expected:
        assert part in message


@pytest.mark.parametrize("flags", ["--mamba-num-heads 12", "--mamba-num-heads 12 --mamba-num-groups 2"])
def test_flags_that_agree_with_the_embedded_model_are_accepted(flags):
    """Twelve heads do not go with the defaults of other fields, and are what the embedded model has."""
    assert parse_arguments(flags.split()).model_overrides["mamba_num_heads"] == 12
    with pytest.raises(ConfigError, match="12 Mamba heads cannot be shared by 8 Mamba groups"):
        parse_arguments([*flags.split(), "--hidden-size", "384", "--mamba-num-groups", "8"])
