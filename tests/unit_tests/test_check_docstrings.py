"""Lint step that keeps docstrings without a subject out, and messages with a pronoun for it."""

from __future__ import annotations

import pytest

from tools.check_docstrings import main


@pytest.fixture
def check(tmp_path, capsys):
    """Return a function that checks a module, and returns the exit status and the printed lines."""

    def run(source: str) -> tuple[int, list[str]]:
        (tmp_path / "module.py").write_text(source)
        return main([str(tmp_path)]), capsys.readouterr().out.splitlines()

    return run


@pytest.mark.parametrize(
    "text",
    [
        "What a scheduler asks for.",
        "Whose blocks are shared.",
        "Of the blocks that are free.",
        "Its tokens.",
        "The same, in fp32.",
        "J.",
        "Block that nobody uses.",
        "Copy a block.\n\n    Args:\n        size: Of the block.\n    ",
    ],
)
@pytest.mark.parametrize(
    "place",
    ['"""{}"""\n', 'def f():\n    """{}"""\n', 'class C:\n    """{}"""\n', 'class C:\n    x = 1\n    """{}"""\n'],
    ids=["module", "function", "class", "attribute"],
)
def test_docstrings_without_a_subject_are_found(check, place, text):
    status, lines = check(place.format(text))
    assert status == 1
    assert len(lines) == 1
    assert "module.py:" in lines[0]


@pytest.mark.parametrize(
    "text",
    ["Block table of a request.", "Return the free blocks.", "Free blocks.\n\n    Those in use are elsewhere.\n    "],
)
def test_docstrings_with_a_subject_are_accepted(check, text):
    assert check(f'"""{text}"""\n\ndef f():\n    """{text}"""\n') == (0, [])


@pytest.mark.parametrize(
    "text",
    [
        "its frequencies are not those of the model",
        "the group is not that of the engine",
        "removes what it has on disk",
        "reads those that end with .json",
        "22 is too large; at most 4 would do",
        "{} is too large; at most {} would do",
        "the file is no index of a cache",
        "the slot that nobody holds",
    ],
)
@pytest.mark.parametrize(
    "place",
    [
        "raise ValueError({})\n",
        "logger.warning({}, 1)\n",
        "Flag('name', {}, metavar='N')\n",
        "field(default=0, help={})\n",
        "require(False, 'a' + {})\n",
        "reason = {}\n",
    ],
)
def test_messages_without_a_noun_are_found(check, place, text):
    is_built = "{}" in text
    status, lines = check(place.format(("f" if is_built else "") + repr(text.replace("{}", "{name}"))))
    assert status == 1
    assert len(lines) == 1
    assert "module.py:1: " in lines[0]


def test_a_message_in_parts_is_read_as_one(check):
    assert check('raise ValueError(\n    f"{a} is not that "\n    "of the model"\n)\n')[0] == 1


@pytest.mark.parametrize("text", ["blocks that nobody uses", "requests, of which there are none"])
def test_comments_are_read(check, text):
    assert check(f"x = 1  # {text}\n")[0] == 1


@pytest.mark.parametrize(
    "source",
    [
        'raise ValueError(f"{value} must be at most {limit}; give fewer")\n',
        'prompts = ["What does a generator do?"]\n',
        'key = "what is"\n',
        "x = 1  # blocks that the cache holds\n",
    ],
)
def test_messages_with_nouns_are_accepted(check, source):
    assert check(source) == (0, [])


def test_a_missing_path_is_an_error(capsys, tmp_path):
    assert main([str(tmp_path / "absent")]) == 2
    assert "absent does not exist" in capsys.readouterr().err
