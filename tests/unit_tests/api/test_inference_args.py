"""MF-13: `add_inference_args` and `settings_from_args` with parsers of Megatron-LM 0.16.1 and 0.19.2."""

from __future__ import annotations

import argparse
import doctest
import re

import pytest

from arguments.groups import GROUPS
from arguments.megatron.synonyms import SYNONYMS
from arguments.parser import parse_arguments
from megatron_ext import add_inference_args, settings_from_args
from megatron_ext.api.inference_args import RECORD
from megatron_ext.api.loading import read_settings
from megatron_ext.config import RunConfig
from megatron_ext.errors import ConfigError
from tests.unit_tests.support.megatron_parsers import VERSIONS, megatron_parser

BATCHING = "inference-dynamic-batching"
OURS = "inference_dynamic_batching"


@pytest.fixture(params=VERSIONS)
def version(request) -> str:
    return request.param


def parse(version: str, text: str = "") -> argparse.Namespace:
    return add_inference_args(megatron_parser(version)).parse_args(text.split())


def settings(version: str, text: str = "", **options) -> dict:
    return settings_from_args(parse(version, text), **options)


def actions(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    return {name: action for action in parser._actions for name in action.option_strings}


def test_the_parsers_own_flags_stay_as_they_are(version):
    before = megatron_parser(version)
    after = add_inference_args(megatron_parser(version))
    assert set(actions(before)) < set(actions(after))
    for name, action in actions(before).items():
        same = actions(after)[name]
        for attribute in ("option_strings", "dest", "default", "const", "type", "choices", "nargs"):
            assert getattr(same, attribute) == getattr(action, attribute), name
    plain = vars(before.parse_args([]))
    joined = vars(after.parse_args([]))
    assert {name: joined[name] for name in plain} == plain
    assert {joined[name] for name in joined.keys() - plain.keys() - {RECORD}} == {None}


def test_every_engine_flag_is_there_once(version):
    """Each flag of an engine is in the joined parser, flags of runs are not added, and no attribute has two owners."""
    own, joined = actions(megatron_parser(version)), actions(add_inference_args(megatron_parser(version)))
    for group in (*GROUPS, SYNONYMS):
        for flag in group.flags:
            names = {*flag.names, f"--no-{flag.key}"}
            if group.config is not RunConfig or flag.field == "inference_logging_step_interval":
                assert names & joined.keys(), flag.option
            else:
                assert names & joined.keys() == names & own.keys(), flag.option
    added = {action.dest for name, action in joined.items() if name not in own}
    assert not added & {action.dest for action in own.values()}


def test_nothing_typed_is_no_setting(version):
    assert settings(version) == {}
    assert settings(version, attach=True) == {}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("--inference-max-seq-length 4096", {"inference_max_seq_length": 4096}),
        ("--inference-max-seq-length 2560", {"inference_max_seq_length": 2560}),  # Megatron's default, typed
        (f"--{BATCHING}-block-size=256", {f"{OURS}_block_size": 256}),
        (f"--{BATCHING}-buffer-size-gb 20", {f"{OURS}_buffer_size_gb": 20.0}),
        ("--tensor-model-parallel-size 2", {"tensor_model_parallel_size": 2}),
        ("--distributed-timeout-minutes 5", {"distributed_timeout_minutes": 5}),
        ("--seed 7", {"seed": 7}),
        (f"--{BATCHING}-block-count 64", {f"{OURS}_block_count": 64}),  # flags of ours
        (f"--{BATCHING}-prefix-caching-mamba-slots 8", {f"{OURS}_prefix_caching_mamba_slots": 8}),
        ("--no-explain-prefix-cache", {"explain_prefix_cache": False}),
        ("--speculative-method ngram --num-speculative-tokens 3",
         {"speculative_method": "ngram", "num_speculative_tokens": 3}),
        ("--disable-chunked-prefill", {"disable_chunked_prefill": True}),
        ("--return-log-probs --stop-words a b", {"return_log_probs": True, "stop_words": ("a", "b")}),
    ],
)  # fmt: skip
def test_typed_flags_are_settings_of_both_engines(version, text, expected):
    for attach in (False, True):
        found = settings(version, text, attach=attach)
        assert found == expected
        read_settings(found)


@pytest.mark.parametrize(
    "text",
    [
        "--load DIR --use-checkpoint-args --bf16 --tokenizer-type TikTokenizer --tokenizer-model FILE",
        "--pretrained-checkpoint DIR --transformer-impl transformer_engine",
        "--num-layers 4 --hidden-size 64 --swiglu --disable-bias-linear --norm-epsilon 1e-6 --apply-layernorm-1p",
        "--num-layers 4 --window-size 127,0 --window-attn-skip-freq 2 --num-experts 4 --moe-layer-freq 2",
        "--hybrid-override-pattern M-M*- --spec megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec",
        "--load-hf DIR --enable-chunked-prefill --no-use-tokenizer-model-from-checkpoint-args",
        f"--load DIR --{BATCHING}-max-requests 8 --{BATCHING}-num-cuda-graphs -1 --cuda-graph-impl local",
        "--load DIR --num-layers 4 --normalization RMSNorm --position-embedding-type rope --rotary-base 1000000",
    ],
)
def test_settings_equal_those_of_our_command_line(version, text):
    found = read_settings(settings(version, text))
    expected = parse_arguments(text.split())
    for name in ("source", "model_overrides", "parallel", "batching", "cache", "speculation"):
        assert getattr(found, name) == getattr(expected, name), name


def test_an_engine_of_a_model_has_no_settings_of_a_model(version):
    """`attach` leaves out weights, tokenizer, sizes, types of parameters and layers of stages, and keeps the rest."""
    model = "--load DIR --bf16 --num-layers 4 --tokenizer-type NullTokenizer --vocab-size 64 --fp8-as-16bit"
    stages = "--pipeline-model-parallel-size 2 --num-layers-in-first-pipeline-stage 1"
    assert settings(version, f"{model} {stages} --inference-max-seq-length 512 --seed 3", attach=True) == {
        "inference_max_seq_length": 512,
        "pipeline_model_parallel_size": 2,
        "seed": 3,
    }


def test_the_three_flags_of_sampling_count_together(version):
    """Megatron's scripts sample from the first token unless --top_k is 0; ours are greedy at temperature 0."""
    assert settings(version, "--temperature 0.8") == {"temperature": 0.8, "top_k": 1, "top_p": 0.0}
    assert settings(version, "--top_k 0 --top_p 0.9") == {"temperature": 1.0, "top_k": 0, "top_p": 0.9}


def test_values_that_the_program_sets_count(version):
    namespace = parse(version, "--bf16")
    namespace.inference_max_seq_length = 1024
    namespace.cuda_graph_impl = "none"
    namespace.hybrid_layer_pattern = namespace.hybrid_override_pattern = "M-M*-"  # as 0.19.2 does when it checks them
    assert settings_from_args(namespace) == {
        "bf16": True,
        "hybrid_override_pattern": "M-M*-",
        "inference_max_seq_length": 1024,
    }


def test_two_names_of_one_flag_must_agree():
    namespace = parse("0.19.2", "--hybrid-layer-pattern M-M*- --hybrid-override-pattern M*")
    with pytest.raises(ConfigError, match=r"^--hybrid-override-pattern M\* and --hybrid-layer-pattern M-M\*- contra"):
        settings_from_args(namespace)


@pytest.mark.parametrize("attach", [False, True])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("--flash-decode", "--flash-decode is refused"),
        ("--use-legacy-static-engine", "--use-legacy-static-engine is refused"),
        ("--inference-batch-times-seqlen-threshold 4", "--inference-batch-times-seqlen-threshold 4 is refused"),
        ("--context-parallel-size 2", "--context-parallel-size 2 is refused"),
        ("--ckpt-format torch", "--ckpt-format torch is refused"),
        ("--fp8-format hybrid", "--fp8-format is refused"),
        ("--no-fp8-wgrad", "--no-fp8-wgrad is refused"),
        ("--moe-router-load-balancing-type sinkhorn", "--moe-router-load-balancing-type sinkhorn is refused"),
        ("--cuda-graph-impl transformer_engine", "cuda_graph_impl 'transformer_engine' is unknown"),
        (f"--{BATCHING}-block-size 0", "-block-size 0 must be between 1 and"),
        ("--tensor-model-parallel-size 0", "--tensor-model-parallel-size 0 must be between 1 and"),
        ("--top_p 2", "top_p 2.0 must be between"),
        ("--num-speculative-tokens 2 --speculative-method ngram --speculative-ngram-longest 0", "longest"),
    ],
)
def test_values_that_cannot_be_honoured_are_refused_by_name(version, text, message, attach):
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        settings(version, text, attach=attach)
    assert "\n" not in str(caught.value)


def test_flags_of_inference_without_effect_are_told(version, caplog):
    settings(version, f"--{BATCHING}-unified-memory-level 1 --seq-length 7 --fp8-format hybrid --fp8-as-16bit")
    accepted, memory, types = (record.getMessage() for record in caplog.records)
    assert accepted == f"accepted, and without effect here: --{BATCHING}-unified-memory-level, --fp8-format"
    assert memory.startswith(f"--{BATCHING}-unified-memory-level 1: unified memory is not used")
    assert "bf16" in types


def test_the_example_in_the_docstring():
    """PY-8: it gives the result shown."""
    runner = doctest.DocTestRunner()
    (test,) = doctest.DocTestFinder().find(add_inference_args, globs=dict(globals()))
    runner.run(test)
    assert (runner.tries, runner.failures) == (2, 0)
