"""SE-1: a YAML file of flags takes work in proportion to its size, which has a limit, whatever is in it."""

from __future__ import annotations

import os

import pytest

from arguments import parse_arguments, yaml_file

DOUBLINGS = "".join(f"top_k: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 64))
FULL = yaml_file.LONGEST_FILE - 100


@pytest.fixture
def refusal(tmp_path, one_line_error):
    """A function: the message for a file of that text, which is one short line."""

    def refuse(text: str) -> str:
        path = tmp_path / "flags.yaml"
        path.write_text(text)
        message = one_line_error("--model-config", str(path))
        assert len(message) < 400 + len(str(path))
        return message.replace(str(path), "FILE")

    return refuse


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("stop-words: &a0 [x, x]\n" + DOUBLINGS, "FILE, line 2: top_k: a list may have single values only"),
        ("stop-words: &a [*a]\n", "stop-words: a list may have single values only"),
        ("seed: {a: {b: 1}}\n", "FILE, line 1: nesting is deeper than a list of values"),
        ("[" * FULL, "nesting is deeper than a list of values"),
        ("{a: " * (FULL // 4), "nesting is deeper than a list of values"),
        ("prompts: [" + "a," * (FULL // 2) + "]", "more than 10000 keys and values"),
        ("seed: " + "1" * FULL, "is too long for a number"),
        ("seed: 2001-99-99\n", "FILE, line 1: seed: month must be in 1..12"),
        ("seed: {}\n", "seed: a mapping is not a value of a flag"),
        ("? {a: 1}\n: 1\n", "FILE, line 1: the key is not the name of a flag"),
        ("seed: !!python/object/apply:builtins.print [1]\n", "its YAML type 'tag:yaml.org,2002:python/object/apply"),
        ("k" * 1000 + ": 1\n", "is not a flag that the file may contain"),
        ("#" * 300_000, f"FILE: 300000 bytes or more; such a file must have at most {yaml_file.LONGEST_FILE}"),
    ],
    ids=lambda text: text[:30],
)
def test_refused_in_one_line(refusal, text, expected):
    assert expected in refusal(text)


def test_the_loader_stops_where_a_limit_is_passed(refusal, monkeypatch):
    """Bounded by counts: of a file with a million openings only the first few are composed."""
    composed = []
    compose = yaml_file._FlagLoader.compose_node

    def counting(self, parent, index):
        composed.append(index)
        return compose(self, parent, index)

    monkeypatch.setattr(yaml_file._FlagLoader, "compose_node", counting)
    refusal("[" * FULL)
    assert len(composed) == 4
    refusal("prompts: [" + "a," * (FULL // 2) + "]")
    assert len(composed) == 4 + 10_001


def test_an_alias_of_one_value_or_of_a_list_of_values_is_that(tmp_path):
    path = tmp_path / "flags.yaml"
    path.write_text("prompts: &both [one, two]\nstop-words: *both\nseed: &number 7\ntop_k: *number\n")
    arguments = parse_arguments(["--model-config", str(path)])
    assert arguments.sampling.stop_words == arguments.run.prompts == ("one", "two")
    assert arguments.source.seed == arguments.sampling.top_k == 7


def test_a_named_pipe_does_not_block(tmp_path, one_line_error):
    path = tmp_path / "flags.yaml"
    os.mkfifo(path)
    assert one_line_error("--model-config", str(path)).endswith("flags.yaml: a named pipe; only a regular file is read")
