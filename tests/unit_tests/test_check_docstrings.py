"""Lint step that keeps docstrings without a subject out."""

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


def test_a_missing_path_is_an_error(capsys, tmp_path):
    assert main([str(tmp_path / "absent")]) == 2
    assert "absent does not exist" in capsys.readouterr().err
