"""MF-1: each flag of the table acts as its record states, in the parser, in both tools and in a YAML file."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from pathlib import Path

import pytest

from arguments import build_parser, build_server_parser, parse_arguments, parse_server_arguments
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


def values_of(flag) -> list[str]:
    """Values that a flag accepts."""
    return {0: [], 1: ["7"], None: ["7", "8"]}[flag.count] if flag.only is None else [flag.only]


def test_each_record_is_sound():
    flags = list(records(SERVER_TABLE))
    assert len({flag.name for flag in flags}) == len(flags), "a flag stands there twice"
    counts = Counter(flag.kind for flag in records())
    assert counts.keys() == {"accepted", "refused"}
    assert min(counts.values()) > 10
    for flag in flags:
        assert re.fullmatch(r"--[a-z][a-z0-9_-]*\*?", flag.name), flag.name
        assert flag.why, flag.name
        texts = (flag.why, *flag.refused_values.values(), *flag.warned_values.values())
        assert not any("\n" in text for text in texts), flag.name
        assert not flag.is_family or flag.is_refused, flag.name
        assert flag.unless is None or flag.kind == "refused", flag.name


# Names of flags of Megatron-LM's main branch (22 August 2026) that 0.19.2 does not have, or that its runs do not give.
OF_MAIN = (Path(__file__).parents[2] / "support" / "megatron_main_flags.txt").read_text("utf-8").splitlines()
HONOURED = {
    "--inference-sampling-seed": ("source", "sampling_seed", "7", 7),
    "--rl-inference-parsers": ("server", "reasoning_parser", "deepseek-r1-reasoning", "think"),
}


@pytest.mark.parametrize("line", OF_MAIN)
def test_flags_of_main_are_classified(line):
    """Each is honoured, has no effect, or is refused with what to do instead."""
    name, *value = line.split()
    flag = next((flag for flag in records(SERVER_TABLE) if flag.name == name), None)
    if name in HONOURED:
        part, field, text, expected = HONOURED[name]
        assert getattr(getattr(parse_server_arguments([name, text]), part), field) == expected
    elif flag is None:
        with pytest.raises(ConfigError, match=rf"{name}: invalid choice: '{value[0]}' \(choose from"):
            parse_server_arguments([name, *value])
    elif flag.is_refused or flag.unless:
        with pytest.raises(ConfigError, match=rf"^{name}.* is refused: .*(leave it out|give )"):
            parse_server_arguments([name, *values_of(flag)])
    else:
        assert name in parse_server_arguments([name, *values_of(flag)]).start_notes[0]


def test_one_seed_draws_and_another_makes_weights():
    source = parse_arguments("--seed 5 --inference-sampling-seed 7".split()).source
    assert (source.seed, source.sampling_seed) == (5, 7)
    assert parse_arguments("--seed 5".split()).source.sampling_seed == 5
    with pytest.raises(ConfigError, match="--inference-sampling-seed -1 must be between 0"):
        parse_arguments("--inference-sampling-seed -1".split())


@pytest.mark.parametrize(("parse", "flag"), CASES)
def test_as_typed_and_in_a_yaml_file(parse, flag, tmp_path):
    name, values, path = flag.name.replace("*", "any"), values_of(flag), tmp_path / "flags.yaml"
    value = "true" if not values else values[0] if flag.count == 1 else f"[{', '.join(values)}]"
    path.write_text(f"{name.lstrip('-')}: {value}\n")
    for argv, place in (([name, *values], ""), (["--model-config", str(path)], f"{path}, line 1: ")):
        if flag.is_refused:
            with pytest.raises(ConfigError, match=re.escape(flag.why)) as caught:
                parse(argv)
            assert str(caught.value).startswith(place + name)
            continue
        if flag.unless:
            with pytest.raises(ConfigError, match=f"{name} is refused: {re.escape(flag.why)}"):
                parse(argv)
        settings = parse([*argv, *(["--fp8-as-16bit"] if flag.unless else [])])
        assert settings.start_notes[0] == f"accepted, and without effect here: {name}"
        if not place and not flag.unless:
            assert dataclasses.replace(settings, start_notes=()) == parse([])


@pytest.mark.parametrize("flag", [one for one in records() if one.only], ids=lambda one: one.name)
def test_other_values_are_refused(flag):
    with pytest.raises(ConfigError, match=f"{flag.name} 17 is refused: .*; give {flag.only}"):
        parse_arguments([flag.name, "17"])


@pytest.mark.parametrize(
    ("option", "beginning"),
    [("--disagg-role", "--disagg-*"), ("--disagg-kv-transport-backend", "--disagg-*")],
)
def test_families(option, beginning):
    assert family_of(option).name == beginning
    for argv in ([f"{option}=4"], [option, "4"], ["--seed", "1", option, "4"]):
        with pytest.raises(ConfigError, match=f"^{option}[= ]4 is refused: megatron-ext serve runs one engine"):
            parse_arguments(argv)


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [
        ([], "bf16"),
        (["--bf16"], "bf16"),
        (["--fp16"], "fp16"),
        (["--dtype", "bfloat16"], "bf16"),
        (["--dtype", "float16"], "fp16"),
    ],
)
def test_8_bits_become_16(dtype, kind):
    """MF-1: --fp8-as-16bit accepts flags of 8-bit computation, sets 16 bits, and says so."""
    settings = parse_arguments(["--fp8-format", "hybrid", "--fp8-recipe", "tensorwise", "--fp8-as-16bit", *dtype])
    assert settings.source.parameter_type == {"bf16": "bfloat16", "fp16": "float16"}[kind]
    accepted, line = settings.start_notes
    assert accepted == "accepted, and without effect here: --fp8-format, --fp8-recipe"
    assert "--fp8-format, --fp8-recipe: nothing is computed in 8 bits" in line
    assert f"in {kind}" in line


def test_sinkhorn_is_refused_and_others_are_not():
    assert parse_arguments("--moe-router-load-balancing-type aux_loss seq_aux_loss".split()).start_notes
    with pytest.raises(ConfigError, match="-type aux_loss sinkhorn is refused: sinkhorn is another routing algorithm"):
        parse_arguments("--moe-router-load-balancing-type aux_loss sinkhorn".split())


def test_one_line_lists_all_in_order_and_each_once():
    argv = "--verbose --seed 1 --async-mode --verbose --skip-prompt-log-probs".split()
    assert parse_arguments(argv).start_notes == (
        "accepted, and without effect here: --verbose, --async-mode, --skip-prompt-log-probs",
    )
    assert parse_arguments(["--seed", "1"]).start_notes == ()


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
        assert f"{group.heading}:" in text
        for flag in group.flags:
            assert flag.is_family or f"  {flag.name}" in text
            assert flag.why in plain.replace("- ", "-")
