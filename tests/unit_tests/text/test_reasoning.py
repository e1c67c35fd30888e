"""SA-9: thinking is separated from answers, however their text comes."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from megatron_ext.text.reasoning import FORMATS, ReasoningFormat, ReasoningReader, begins_inside, format_of

TEXTS = [
    ("{o}\nabc d\n\n{c}\n\nhello <t> x ", False, ("abc d", "hello <t> x ")),
    ("abc\n e {c}hi", True, ("abc\n e", "hi")),
    ("hello {o}", False, ("", "hello {o}")),
    ("  {o}abc", False, ("abc", "")),
    ("", False, ("", "")),
    ("{o}{c}x", False, ("", "x")),
    (" {c} y", True, ("", "y")),
    ("  plain", False, ("", "  plain")),
    ("abc \n", True, ("abc \n", "")),
    ("a{c}b{c}", True, ("a", "b{c}")),
    (" {h}", False, ("", " {h}")),
    ("<", False, ("", "<")),
    ("{o} a < b\n{c}\n\n{o}", False, ("a < b", "{o}")),
]


def read(form: ReasoningFormat, pieces: Iterable[str], is_inside: bool, *, is_cut: bool = False) -> list[str]:
    """Thinking and answer of a text that comes in pieces."""
    reader, given = ReasoningReader(form, is_inside=is_inside), list(pieces) or [""]
    found = [reader.feed(one) for one in given[:-1]] + [reader.feed(given[-1], is_last=True, is_cut=is_cut)]
    return ["".join(parts) for parts in zip(*found, strict=True)]


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
@pytest.mark.parametrize(("text", "is_inside", "parts"), TEXTS, ids=lambda value: repr(value)[:20])
def test_parts_do_not_depend_on_pieces(form, text, is_inside, parts):
    text, *parts = (one.format(o=form.opening, c=form.closing, h=form.opening[:4]) for one in (text, *parts))
    assert read(form, [text], is_inside) == parts
    assert read(form, text, is_inside) == parts
    for i in range(1, len(text)):
        assert read(form, [text[:i], text[i:]], is_inside) == parts
        thinking, answer = read(form, [text[:i]], is_inside, is_cut=True)
        assert parts[0].startswith(thinking.rstrip()), "no part of a marker"
        assert parts[1].startswith(answer.rstrip())


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_found_from_templates_and_prompts(form):
    assert format_of(f"{{{{ x }}}}{form.opening}{form.closing}") is form
    assert format_of("{{ messages }}") is None
    assert begins_inside(f"<|assistant|>{form.opening}\n", form)
    assert not begins_inside(f"<|assistant|>{form.opening}\n\n{form.closing}\n\n", form)
    assert not begins_inside("<|assistant|>", form)
