"""MF-2: values of Megatron's YAML files become the arguments that its shell script makes of them."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from arguments.megatron.yaml_form import arguments_of, as_xargs, with_variables

TEXTS = {
    "plain": "plain",
    "two words": "two words",
    "  blanks   shrink \t here ": "blanks shrink here",
    "'\"the\"'": '"the"',
    '"the"': "the",
    "a'b c'd": "ab cd",
    "'' x": " x",
    r"two \\ become one": r"two \ become one",
    r"a\ b": "a b",
    r"a\nb": "anb",
    r"'in \\ quotes'": r"in \\ quotes",
    "[a b]": "[a b]",
}
KEPT = ["it's", 'an odd "quote', "'a\nb'", "ends with \\"]


@pytest.mark.parametrize(("text", "expected"), TEXTS.items())
def test_as_xargs(text, expected):
    assert as_xargs(text) == expected


@pytest.mark.parametrize("text", KEPT)
def test_a_text_that_xargs_refuses_is_kept(text):
    assert as_xargs(text) == text


@pytest.mark.skipif(shutil.which("xargs") is None, reason="nothing to compare with")
@pytest.mark.parametrize("text", TEXTS)
def test_xargs_agrees(text):
    done = subprocess.run(["xargs"], input=text + "\n", capture_output=True, text=True, check=True)
    assert done.stdout.removesuffix("\n") == as_xargs(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("one argument", ["one argument"]),
        ("[several of them]", ["several", "of", "them"]),
        ("[]", []),
        ("[open", ["[open"]),
        ("module name", ["module name"]),
    ],
)
def test_arguments(text, expected):
    assert arguments_of(text) == expected


def test_variables():
    environment = {"A": "/a b", "B_2": "x"}
    assert with_variables("${A}/${B_2}/$A/{A}", environment) == "/a b/x/$A/{A}"
    with pytest.raises(ValueError, match=r"^\$\{C\} is not set in the environment; export C first$"):
        with_variables("${A}${C}", environment)
