"""SA-5: forms of answers, compiled for a tokenizer: what may come next, what is refused and how, and what it costs."""

from __future__ import annotations

import pytest

from megatron_ext.config.differences import EMBEDDED_MODEL_DIR
from megatron_ext.config.request import ResponseFormat
from megatron_ext.errors import ConfigError
from megatron_ext.text import grammars as module
from megatron_ext.text.grammars import Grammars
from megatron_ext.text.tokenizer import TextTokenizer

TOKENIZER = TextTokenizer(EMBEDDED_MODEL_DIR)
SIZE = TOKENIZER.vocab_size + 40  # padding, which no answer has
GRAMMARS = Grammars(TOKENIZER, SIZE)
ENDS = (0, 4)


def schema(**fields: object) -> ResponseFormat:
    return ResponseFormat.json_schema(fields)


def allowed(form: ResponseFormat, text: str) -> set[int]:
    """Tokens that may follow a text."""
    matcher = GRAMMARS.matcher(form)
    matcher.take(TOKENIZER.tokenize_plain(text))
    mask = matcher.allowed(ENDS)
    return {token for token in range(8 * len(mask)) if mask[token // 8] >> token % 8 & 1}


def is_answer(form: ResponseFormat, text: str) -> bool:
    """Return whether an answer may end after this text."""
    try:
        return allowed(form, text).issuperset(ENDS)
    except ValueError:
        return False


OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("form", "good", "bad"),
    [
        (schema(**OBJECT), ['{"a":1}', '{"a": -7, "b": [null]}'], ['{"a":1', '{"a":1.5}', "{}", '{"a":  1}', "x"]),
        (schema(**OBJECT), ['{"a":1,"b":"\\n"}'], ['{"a":1,"a":"x"}', '{"a":1,"\\u0061":"x"}']),
        (schema(enum=["on", 3, None]), ['"on"', "3", "null"], ['"off"', "4"]),
        (schema(type="string", minLength=2, maxLength=3), ['"ab"', '"äöü"'], ['"a"', '"abcd"', "ab"]),
        (schema(type="array", items={"$ref": "#"}), ["[]", "[[],[[]]]"], ["[1]", "["]),
        (schema(const="\\u0001"), ['"\\\\u0001"'], ['"\\u0001"']),
        (ResponseFormat("json_object"), ["{}", '{"x": {"y": [1, true]}}'], ["[]", "1", '{"x"}']),
        (ResponseFormat.regex("(ab|c)+[0-9]{2}"), ["abc17", "c00"], ["ab", "17", "abc1", "abc177"]),
        (
            ResponseFormat.choice(["yes", "yes, but", 'a "quoted"\n\\ text', "äß"]),
            ["yes", "yes, but", 'a "quoted"\n\\ text', "äß"],
            ["", "ye", "yes,", "no", "yesyes", "ä"],
        ),
    ],
    ids=str,
)
def test_where_an_answer_may_end(form, good, bad):
    assert [text for text in good if not is_answer(form, text)] == []
    assert [text for text in bad if is_answer(form, text)] == []


@pytest.mark.parametrize("missing", [1, 40, 64])
def test_a_model_with_fewer_ids_than_the_tokenizer(missing):
    """The masks are as wide as the model's logits, and allow what they allow for a whole vocabulary."""
    form, size = ResponseFormat.regex(".*"), TOKENIZER.vocab_size - missing
    matchers = [Grammars(TOKENIZER, one).matcher(form) for one in (TOKENIZER.vocab_size, size)]
    whole, mask = (int.from_bytes(matcher.allowed((0, size)), "little") for matcher in matchers)
    assert whole.bit_length() > size
    assert mask == whole & ((1 << size) - 1)


def test_ends_may_come_where_the_answer_is_complete_and_nowhere_else():
    """Ordinary tokens that end a request, too; special tokens and padding never."""
    comma = TOKENIZER.tokenize_plain(",")[0]
    matcher = GRAMMARS.matcher(schema(**OBJECT))
    matcher.take(TOKENIZER.tokenize_plain('{"a":1'))
    mask = matcher.allowed((comma,))
    assert not mask[comma // 8] >> comma % 8 & 1
    tokens = allowed(schema(**OBJECT), '{"a":1')
    assert comma in tokens
    assert not tokens & {*range(5), *range(TOKENIZER.vocab_size, 8 * len(mask))}
    assert allowed(schema(**OBJECT), '{"a":1}') == set(ENDS)
    matcher.take(TOKENIZER.tokenize_plain("}"))
    assert [i for i, byte in enumerate(matcher.allowed((-1, 0, 8 * len(mask), 10**9))) if byte] == [0]
    ends_here = matcher.allowed((comma,))  # and no other token, the one that usually ends a text included
    assert [token for token in range(8 * len(mask)) if ends_here[token // 8] >> token % 8 & 1] == [comma]
    assert 8 * len(mask) >= SIZE, "a bit for each id of the model"


@pytest.mark.parametrize(
    ("form", "named"),
    [
        (schema(**{"not": {"type": "string"}}), 'Unimplemented keys: ["not"]'),
        (schema(type="array", uniqueItems=True), "uniqueItems"),
        (schema(**{"type": "object", "x-guidance": {"lenient": True}, "propertyNames": {}}), "propertyNames"),
        (schema(oneOf=[{"type": "string"}, {"minLength": 2}]), "oneOf"),
        (schema(type="string", format="phone"), "Unknown format: phone"),
        (schema(type="string", pattern="(?=a)b"), "look-around"),
        (schema(**{"$ref": "http://127.0.0.1:1/schema.json"}), "does not fetch"),
        (schema(**{"$ref": "#"}), "no output satisfies it"),
        (schema(type="integer", minimum=3, maximum=2), "minimum (3) is greater"),
        (schema(const="\x1f"), "control character"),
        (schema(const="\\\x01"), "control character"),
        (ResponseFormat.regex("b(a"), "unclosed group, at character 2 of the expression"),
        (ResponseFormat.regex("x\ny[a-"), "unclosed character class, at character 5 of the expression"),
        (ResponseFormat.regex("(a)\\1"), "backreferences are not supported, at character 4 of the expression"),
        (schema(type="string", pattern="a(?=b)"), "is not supported, at character 2 of the expression"),
    ],
    ids=str,
)
def test_unsupported_keywords_are_named(form, named):
    with pytest.raises(ConfigError) as caught:
        GRAMMARS.check(form)
    assert named in str(caught.value)
    assert str(caught.value).startswith(f"response_format: the {form.kind} is not supported: ")
    assert "\n" not in str(caught.value)
    for noise in ("regex parse error", "(in regex)", "start: /", "^"):  # of the library's own grammar
        assert noise not in str(caught.value)


def test_too_costly_grammars_are_refused(monkeypatch):
    """Bounded while it is compiled, and at each token; the words do not quote the answer."""
    monkeypatch.setitem(module._LIMITS, "initial_lexer_fuel", 1000)
    with pytest.raises(ConfigError, match="too big"):
        Grammars(TOKENIZER, SIZE).check(schema(enum=[f"word {i}" for i in range(1000)]))
    monkeypatch.undo()
    monkeypatch.setitem(module._LIMITS, "step_max_items", 40)
    matcher = Grammars(TOKENIZER, SIZE).matcher(ResponseFormat("json_object"))
    with pytest.raises(ValueError) as caught:  # noqa: PT012 - at whichever token it becomes too much
        for _ in range(50):
            matcher.take(TOKENIZER.tokenize_plain('{"secret":'))
            matcher.allowed(ENDS)
    assert "secret" not in str(caught.value)


def test_nested_deep_is_refused():
    nested: dict = {"type": "string"}
    for _ in range(200):
        nested = {"type": "array", "items": nested}
    with pytest.raises(ConfigError, match="recursion limit"):
        GRAMMARS.check(schema(**nested))


def test_a_form_is_compiled_once_and_few_are_kept(monkeypatch):
    made = []
    own = Grammars(TOKENIZER, SIZE)
    compile_anew = own._compile_anew
    monkeypatch.setattr(own, "_compile_anew", lambda form: made.append(form) or compile_anew(form))
    monkeypatch.setattr(module, "MAX_COMPILED", 2)
    forms = [ResponseFormat.regex(f"a{i}") for i in range(3)]
    for form in (forms[0], forms[1], forms[0], forms[2], forms[0], forms[1]):
        own.matcher(form)
    assert made == [*forms, forms[1]]
    assert len(own._compiled) == 2
