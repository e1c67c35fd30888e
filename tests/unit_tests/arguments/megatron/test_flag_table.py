"""MF-1: each flag of the table acts as its record states, in the parser, in both tools and in a YAML file."""

from __future__ import annotations

import re

import pytest

from arguments import build_parser, build_server_parser, parse_arguments, parse_server_arguments
from arguments.megatron.flag_record import Effect
from arguments.megatron.flag_table import SERVER_TABLE, TABLE, family_of, records
from megatron_ext.errors import ConfigError

BATCHING = "--inference-dynamic-batching"
# The server has the same table and the sampling flags of runs, so of the table it is asked a few.
OF_RUNS = list(records(TABLE))
OF_SERVERS = [*OF_RUNS[::20], *(flag for flag in records(SERVER_TABLE) if flag not in OF_RUNS)]
CASES = [
    *(pytest.param(parse_arguments, flag, id=f"run {flag.name}") for flag in OF_RUNS),
    *(pytest.param(parse_server_arguments, flag, id=f"server {flag.name}") for flag in OF_SERVERS),
]

# What the specification lists, spelled out once more, so that a flag which is lost is missed.
BARE = """
--exit-on-missing-checkpoint --use-flashinfer-fused-rope --use-flash-attn --no-rope-fusion --no-masked-softmax-fusion
--no-persist-layer-norm --is-hybrid-model --no-position-embedding --inference-dynamic-batching --enable-cuda-graph
--decode-only-cuda-graphs --inference-fuse-tp-communication --moe-grouped-gemm
--inference-use-synchronous-zmq-collectives --moe-pad-experts-for-cuda-graph-inference --moe-shared-expert-overlap
--use-coordinator --no-rl-persist-cuda-graphs --async-mode --verbose
...track-paused-request-events
--sequence-parallel --auto-detect-ckpt-format --inference-ckpt-non-strict --use-mcore-models --no-load-optim
--log-num-zeros-in-grad --log-memory-to-tensorboard --log-timers-to-tensorboard --log-validation-ppl-to-tensorboard
--dist-ckpt-optim-fully-reshardable
--deterministic-mode --ckpt-fully-parallel-save --ckpt-fully-parallel-load --ckpt-assume-constant-structure
--no-create-attention-mask-in-dataloader --te-rng-tracker --inference-rng-tracker --inference-cuda-graph-all-prefills
--rl-persist-cuda-graphs --inference-disable-ep-consensus --no-inference-disable-ep-consensus
--inference-wandb-logging --no-inference-wandb-logging --inference-text-gen-server-logging
""".replace("...", BATCHING + "-").split()
ONE = """
--exit-duration-in-mins --make-vocab-size-divisible-by ...cuda-graph-max-tokens ...sampling-backend ...async-sched-mode
...mamba-memory-ratio --inference-moe-token-dispatcher-type --inference-grouped-gemm-backend
--inference-coordinator-port --moe-aux-loss-coeff --moe-z-loss-coeff --suspend-timeout
--rl-kv-cache-management-mode --coordinator-host
--coordinator-port --frontend-replicas --inference-max-requests --moe-router-dtype ...unified-memory-level
--inference-cuda-graph-scope
--micro-batch-size --attention-backend --dist-ckpt-strictness --max-tokens-to-oom
--timing-log-level --log-interval --seq-length --init-method-std --attention-dropout --hidden-dropout
--num-workers --save-interval --moe-token-dispatcher-type --inference-cuda-graph-max-tokens
...cuda-graph-mixed-prefill-count ...cuda-graph-sizing-distribution ...buffer-guaranteed-fraction
...buffer-overflow-factor
""".replace("...", BATCHING + "-").split()
MANY = "--cuda-graph-scope --cuda-graph-modules --moe-router-load-balancing-type".split()
ONLY = {
    f"{BATCHING}-logprobs-mode": "raw_logprobs",
    "--context-parallel-size": "1",
    "--ckpt-format": "torch_dist",
}
REFUSED = """
--use-legacy-static-engine --flash-decode --inference-batch-times-seqlen-threshold --parsers --inference-shards
--frontend --coordinator-schedule-output-path
""".split()
CONDITIONAL = """
--fp8-format --fp8-recipe --fp8-param-gather --first-last-layers-bf16 --no-fp8-wgrad --fp8-margin --fp8-interval
--fp8-amax-history-len --fp8-amax-compute-algo --num-layers-at-start-in-bf16 --num-layers-at-end-in-bf16
""".split()
FAMILIES = ("--disagg-*", "--prefix-cache-stress-*", "--prefix-cache-compare-*")


def values_of(flag) -> list[str]:
    """Values that a flag accepts."""
    return {0: [], 1: ["7"], None: ["7", "8"]}[flag.count] if not flag.allowed else [flag.allowed[0]]


def test_the_table_has_what_was_promised():
    by_name = {flag.name: flag for flag in records()}
    assert len(by_name) == len(list(records())), "a flag stands there twice"
    accepted = {name: flag for name, flag in by_name.items() if flag.effect is Effect.ACCEPTED}
    assert set(accepted) == {*BARE, *ONE, *MANY}
    assert {name for name, flag in accepted.items() if flag.count == 0} == set(BARE)
    assert {name for name, flag in accepted.items() if flag.count is None} == set(MANY)
    assert {n: f.allowed for n, f in by_name.items() if f.effect is Effect.RESTRICTED} == {
        name: (value,) for name, value in ONLY.items()
    }
    assert {name for name, flag in by_name.items() if flag.effect is Effect.REFUSED} == {*REFUSED, *FAMILIES}
    assert {name for name, flag in by_name.items() if flag.effect is Effect.CONDITIONAL} == {*CONDITIONAL}


def test_each_record_says_why():
    for flag in records(SERVER_TABLE):
        assert re.fullmatch(r"--[a-z][a-z0-9_-]*\*?", flag.name), flag.name
        assert flag.why, flag.name
        assert bool(flag.allowed) == (flag.effect is Effect.RESTRICTED), flag.name
        assert not flag.is_family or flag.effect is Effect.REFUSED, flag.name


@pytest.mark.parametrize(("parse", "flag"), CASES)
def test_on_the_command_line(parse, flag):
    name = flag.name.replace("*", "any")
    if flag.effect is Effect.REFUSED:
        with pytest.raises(ConfigError, match=re.escape(flag.why)) as caught:
            parse([name, *values_of(flag)])
        assert str(caught.value).startswith(name)
        return
    if flag.effect is Effect.CONDITIONAL:
        with pytest.raises(ConfigError, match=f"^{name} is refused: {re.escape(flag.why)}"):
            parse([name, *values_of(flag)])
        return
    settings = parse([name, *values_of(flag)])
    assert settings.start.lines[0] == f"accepted, and without effect here: {name}"
    assert dataclass_fields(settings) == dataclass_fields(parse([]))


def dataclass_fields(settings) -> dict:
    return {name: value for name, value in vars(settings).items() if name != "start"}


@pytest.mark.parametrize(("parse", "flag"), CASES)
def test_in_a_yaml_file(parse, flag, tmp_path):
    """Ours, and Megatron's."""
    name, values = flag.name.replace("*", "any"), values_of(flag)
    value = "true" if not values else values[0] if flag.count == 1 else f"[{' '.join(values)}]"
    for text in (f"{name.lstrip('-')}: {value}\n", f"MODEL_ARGS:\n  {name}: {value}\n"):
        path = tmp_path / "flags.yaml"
        path.write_text(text)
        if flag.effect is Effect.REFUSED:
            with pytest.raises(ConfigError, match=re.escape(flag.why)) as caught:
                parse(["--model-config", str(path)])
            assert str(caught.value).startswith(f"{path}, line {text.count(chr(10))}: {name}")
        else:
            accepting = ["--fp8-as-16bit"] if flag.effect is Effect.CONDITIONAL else []
            settings = parse(["--model-config", str(path), *accepting])
            assert settings.start.lines[0] == f"accepted, and without effect here: {name}"


@pytest.mark.parametrize("flag", [one for one in records() if one.allowed], ids=lambda one: one.name)
def test_other_values_are_refused(flag):
    with pytest.raises(ConfigError, match=f"{flag.name} 17 is refused: .*; give {flag.allowed[0]}"):
        parse_arguments([flag.name, "17"])


@pytest.mark.parametrize("spelled", ["1", "1.0", "+1"])
def test_numbers_are_equal_however_they_are_written(spelled):
    assert parse_arguments(["--context-parallel-size", spelled]).start.lines


@pytest.mark.parametrize(
    ("option", "beginning"),
    [("--disagg-role", "--disagg-*"), ("--disagg-kv-transport-backend", "--disagg-*")],
)
def test_families(option, beginning):
    assert family_of(option).name == beginning
    for argv in ([f"{option}=4"], [option, "4"], ["--seed", "1", option, "4"]):
        with pytest.raises(ConfigError, match=f"^{option}[= ]4 is refused: megatron-ext serve runs one engine"):
            parse_arguments(argv)


@pytest.mark.parametrize(("dtype", "kind"), [([], "bf16"), (["--bf16"], "bf16"), (["--fp16"], "fp16")])
def test_8_bits_become_16(dtype, kind):
    """MF-1: --fp8-as-16bit accepts flags of 8-bit computation, sets 16 bits, and says so."""
    settings = parse_arguments(["--fp8-format", "hybrid", "--fp8-recipe", "tensorwise", "--fp8-as-16bit", *dtype])
    assert (settings.source.bf16, settings.source.fp16) == (kind == "bf16", kind == "fp16")
    accepted, line = settings.start.lines
    assert accepted == "accepted, and without effect here: --fp8-format, --fp8-recipe"
    assert "--fp8-format, --fp8-recipe: nothing is computed in 8 bits" in line
    assert f"in {kind}" in line


def test_16_bits_without_flags_of_8():
    settings = parse_arguments(["--fp8-as-16bit"])
    assert settings.start.lines == ("accepted, and without effect here: --fp8-as-16bit",)
    assert not settings.source.bf16


def test_the_server_records_no_routing():
    with pytest.raises(ConfigError, match="--moe-enable-routing-replay is refused: answers of the server"):
        parse_server_arguments(["--moe-enable-routing-replay"])


def test_sinkhorn_is_refused_and_others_are_not():
    assert parse_arguments("--moe-router-load-balancing-type aux_loss seq_aux_loss".split()).start.lines
    with pytest.raises(ConfigError, match="-type aux_loss sinkhorn is refused: sinkhorn is another routing algorithm"):
        parse_arguments("--moe-router-load-balancing-type aux_loss sinkhorn".split())


def test_unified_memory_warns():
    _, warning = parse_arguments([f"{BATCHING}-unified-memory-level", "1"]).start.lines
    assert warning == (
        f"{BATCHING}-unified-memory-level 1: unified memory is not used, so the buffer must fit the device"
    )
    assert len(parse_arguments([f"{BATCHING}-unified-memory-level", "0"]).start.lines) == 1


def test_one_line_lists_all_in_order_and_each_once():
    argv = "--verbose --seed 1 --async-mode --verbose --skip-prompt-log-probs".split()
    assert parse_arguments(argv).start.lines == (
        "accepted, and without effect here: --verbose, --async-mode, --skip-prompt-log-probs",
    )
    assert parse_arguments(["--seed", "1"]).start.lines == ()


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--ckpt-fromat", "--ckpt-format"),
        ("--use-flash_attn", "--use-flash-attn"),
        ("--max-requests", f"{BATCHING}-max-requests"),  # rather than --inference-max-requests, which has no effect
        ("--inference-max-request", "--inference-max-requests"),
    ],
)
def test_the_nearest_name_may_be_megatrons(typed, meant):
    with pytest.raises(ConfigError, match=f"unrecognized arguments: {typed} 1; did you mean {meant}\\?$"):
        parse_arguments([typed, "1"])


@pytest.mark.parametrize(("build", "table"), [(build_parser, TABLE), (build_server_parser, SERVER_TABLE)])
def test_the_help_shows_them_in_groups(build, table):
    text = build().format_help()
    plain = " ".join(text.split())
    for group in table:
        assert f": {group.title}:" in text
        for flag in group.flags:
            assert flag.is_family or f"  {flag.name}" in text
        assert group.common_reason is None or group.common_reason in plain.replace("- ", "-")
