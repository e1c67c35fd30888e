"""SA-9: thinking is separated from answers, however their text comes."""

from __future__ import annotations

import random

import pytest

from megatron_ext.text.reasoning import FORMATS, ReasoningReader, begins_inside, format_of

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
]


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
@pytest.mark.parametrize(("text", "is_inside", "parts"), TEXTS, ids=lambda value: repr(value)[:20])
def test_parts_do_not_depend_on_pieces(form, text, is_inside, parts):
    text, *parts = (one.format(o=form.opening, c=form.closing) for one in (text, *parts))
    assert ReasoningReader(form, is_inside=is_inside).feed(text, is_last=True) == tuple(parts)
    for seed in range(30):
        sizes, reader, found, start = random.Random(seed), ReasoningReader(form, is_inside=is_inside), ["", ""], 0
        while start < len(text) or start == 0:
            end = min(len(text), start + sizes.randrange(1, 5))
            for i, new in enumerate(reader.feed(text[start:end], is_last=end == len(text))):
                found[i] += new
            start = max(end, 1)
        assert found == parts


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_found_from_templates_and_prompts(form):
    assert format_of(f"{{{{ x }}}}{form.opening}{form.closing}") is form
    assert format_of("{{ messages }}") is None
    assert begins_inside(f"<|assistant|>{form.opening}\n", form)
    assert not begins_inside(f"<|assistant|>{form.opening}\n\n{form.closing}\n\n", form)
    assert not begins_inside("<|assistant|>", form)
