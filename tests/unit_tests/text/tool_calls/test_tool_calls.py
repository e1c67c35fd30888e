"""SA-6: formats of tool calls. Templates write calls, the parser reads them back, and grammars force them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable
from functools import partial

import pytest

from megatron_ext.config.differences import EMBEDDED_MODEL_DIR
from megatron_ext.config.request import LARK, ResponseFormat, ThinkingBudget
from megatron_ext.config.server import REASONING_PARSERS, TOOL_CALL_PARSERS
from megatron_ext.errors import ConfigError
from megatron_ext.text import reasoning
from megatron_ext.text.grammars import Grammars, supported_part
from megatron_ext.text.template_rendering import RENDERER
from megatron_ext.text.template_worker import Rendering
from megatron_ext.text.tokenizer import TextTokenizer
from megatron_ext.text.tool_calls import formats
from megatron_ext.text.tool_calls.formats import AnswerFormat, grammar_of
from megatron_ext.text.tool_calls.functions import Function
from megatron_ext.text.tool_calls.reader import ToolCallReader
from megatron_ext.text.tool_calls.source import Arguments, CallBegun, Content

# Templates of one answer, each with the calls of a family; `tools` is named as in a template that takes tools.
_HEAD = "{# tools #}{{ messages[0].content or '' }}"
_CALLS = "{% for call in messages[0].tool_calls %}{% set f = call.function %}"
_OBJECT = '{"name": "{{ f.name }}", "KEY": {{ f.arguments | tojson }}}'
_LISTED = _OBJECT.replace("KEY", "arguments") + "{{ '' if loop.last else ', ' }}{% endfor %}"
_BETWEEN = "{{ '' if loop.last else '\n' }}{% endfor %}"
_PYTHONIC = (
    "{{ f.name }}({% for key, value in f.arguments | items %}{{ key }}={% if value is boolean or value is none %}"
    "{{ value }}{% else %}{{ value | tojson }}{% endif %}{{ '' if loop.last else ', ' }}{% endfor %})"
    "{{ '' if loop.last else ', ' }}{% endfor %}"
)
TEMPLATES = {
    "hermes": _HEAD + _CALLS + "<tool_call>\n" + _OBJECT.replace("KEY", "arguments") + "\n</tool_call>" + _BETWEEN,
    "nemotron": _HEAD + "<TOOLCALL>[" + _CALLS + _LISTED + "]</TOOLCALL>",
    "mistral": _HEAD + "[TOOL_CALLS][" + _CALLS + _LISTED + "]",
    "mistral named": _HEAD
    + _CALLS
    + "[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}{% endfor %}{# [CALL_ID] #}",
    "granite": _HEAD + "<|tool_call|>[" + _CALLS + _LISTED + "]",
    "llama3_json": _HEAD + _CALLS + _OBJECT.replace("KEY", "parameters") + "{{ '' if loop.last else '; ' }}{% endfor %}"
    '{# "parameters": dictionary of argument name and its value #}',
    "pythonic": _HEAD + "[" + _CALLS + _PYTHONIC + "]{# [func_name1(params_name1=params_value1)] #}",
    "lfm2": _HEAD + "<|tool_call_start|>[" + _CALLS + _PYTHONIC + "]<|tool_call_end|>",
    "qwen3_coder": _HEAD
    + _CALLS
    + "<tool_call>\n<function={{ f.name }}>\n{% for key, value in f.arguments | items %}<parameter={{ key }}>\n"
    "{{ value if value is string else value | tojson }}\n</parameter>\n{% endfor %}</function>\n</tool_call>"
    + _BETWEEN,
}
BARE = {"llama3_json", "pythonic"}  # calls are whole answers
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "exact": {"type": "boolean"},
        "size": {"type": ["number", "string"]},
        "note": {"type": ["string", "null"]},
        "place": {"type": "object", "properties": {"at": {"type": "array", "items": {"type": "number"}}}},
    },
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER, TIME = Function("weather", PARAMETERS, is_strict=True), Function("time-now", {"type": "object"})
FUNCTIONS = (WEATHER, TIME)
ARGUMENTS = {
    "one": {"city": "Oslo"},
    "all": {"city": "Oslo", "days": -2, "exact": True, "note": None, "place": {"at": [59.9, 10.75e0]}},
    "unicode": {"city": "Tromsø 東京 😀", "note": "naïve"},
    "quotes": {"city": "a \"quoted\" 'name', with ] } ) \\ and </tool>", "note": "x=1"},
    "lines": {"city": "two\nlines\n\tand a tab"},
    "empty": {"city": ""},
}


def written(name: str, calls: list[tuple[str, dict]], content: str = "") -> str:
    """Text of an answer by the template of a family."""
    tool_calls = [{"type": "function", "function": {"name": one, "arguments": given}} for one, given in calls]
    message = {"role": "assistant", "content": content, "tool_calls": tool_calls}
    return RENDERER.render(Rendering(TEMPLATES[name], [message], {"add_generation_prompt": False}, {}))


def form_of(name: str) -> formats.ToolCallFormat:
    return formats.format_of(TEMPLATES[name])


def read(name: str, pieces: Iterable[str], max_calls: int = 9, *, is_cut: bool = False) -> tuple[str, list]:
    """Content and calls, with the text of their arguments, of an answer that comes in pieces."""
    reader, content, calls = ToolCallReader(form_of(name), FUNCTIONS, max_calls), "", []
    given = list(pieces) or [""]
    for i, piece in enumerate(given):
        is_last = i == len(given) - 1
        for event in reader.feed(piece, is_last=is_last, is_cut=is_cut and is_last):
            if isinstance(event, Content):
                content += event.text
            elif isinstance(event, CallBegun):
                calls.append((event.name, ""))
            else:
                assert isinstance(event, Arguments)
                calls[-1] = (calls[-1][0], calls[-1][1] + event.text)
    assert reader.count == len(calls)
    return content, calls


def parsed(found: tuple[str, list]) -> tuple[str, list]:
    """Content and calls with the values of their arguments, which are JSON by RFC 8259."""
    content, calls = found

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return content, [(name, json.loads(arguments, parse_constant=refuse)) for name, arguments in calls]


def test_names_are_those_of_the_flags():
    assert {"auto", *formats.NAMES} == set(TOOL_CALL_PARSERS)
    assert {"auto", "none", *reasoning.NAMES} == set(REASONING_PARSERS)
    assert {form_of(name).name for name in TEMPLATES} == set(formats.NAMES)
    for find in (formats.format_named, reasoning.format_named):
        with pytest.raises(ConfigError, match="'what'"):
            find("what")


@pytest.mark.parametrize("name", TEMPLATES)
class TestFormats:
    def test_found_from_the_template(self, name):
        assert form_of(name).name == name.partition(" ")[0]
        assert formats.format_named(form_of(name).name, TEMPLATES[name]) is form_of(name)
        assert formats.format_of("{{ tools }}").name == "hermes"

    def test_pieces_come_early(self, name):
        """Name and arguments are returned before the call ends: arguments as JSON or text, a value at least."""
        text = written(name, [("weather", {"city": "a long name of a city", "days": 3})])
        reader = ToolCallReader(form_of(name), (WEATHER,))
        found = [type(event) for event in reader.feed(text[: text.index("3")])]
        assert found[0] is CallBegun
        assert Arguments in found

    def test_as_many_calls_as_are_wanted(self, name):
        text = written(name, [("weather", {"city": "Oslo"}), ("time-now", {})])
        assert [one for one, _ in read(name, [text], max_calls=1)[1]] == ["weather"]


OSLO, NOW, ROME = ("weather", {"city": "Oslo"}), ("time-now", {}), ("weather", {"city": "Rome"})
JSON_OSLO = '{"name": "weather", "arguments": {"city": "Oslo"}}'
JSON_NOW = '{"name": "time-now", "arguments": {}}'
HERMES = f"<tool_call>\n{JSON_OSLO}\n</tool_call>"
XML = "<tool_call>\n<function=weather>\n{}</function>\n</tool_call>"
XML_OSLO = XML.format("<parameter=city>\nOslo\n</parameter>\n")


def hermes(arguments: str) -> str:
    return f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'


def xml(**values: str) -> str:
    return XML.format("".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items()))


# Answers as models write them: format, text, content, calls.
ANSWERS: list[tuple[str, str, str, list]] = [
    ("hermes", "Hello < world \n", "Hello < world \n", []),
    ("hermes", "", "", []),
    ("hermes", "x <tool_cal", "x <tool_cal", []),
    ("hermes", HERMES, "", [OSLO]),
    ("hermes", f"I look.\n\n{HERMES}\n", "I look.", [OSLO]),
    ("hermes", f"a {HERMES}\n<tool_call>{JSON_NOW}</tool_call> b  c ", "ab  c", [OSLO, NOW]),
    ("hermes", HERMES.removesuffix("</tool_call>"), "", [OSLO]),
    ("hermes", HERMES.replace("\n</", "}\n</"), "", [OSLO]),
    ("hermes", '<tool_call>{"name": "time-now"}</tool_call>', "", [NOW]),
    ("hermes", '<tool_call>{"arguments": {}, "name": "time-now"}</tool_call>', "", [NOW]),
    ("hermes", '<tool_call>{"name": "f", "parameters": {"a": "ä"}, "id": 5}</tool_call>', "", [("f", {"a": "ä"})]),
    ("hermes", hermes('"{\\"a\\": [1]}"'), "", [("f", {"a": [1]})]),
    ("hermes", hermes('{"a": {"b": [1, -2.5e3, {}], "c": []}}'), "", [("f", {"a": {"b": [1, -2500, {}], "c": []}})]),
    ("hermes", hermes('{"a": "C:\\\\x\\\\", "b": "\\"}\\u00e9"}'), "", [("f", {"a": "C:\\x\\", "b": '"}é'})]),
    (
        "hermes",
        hermes('{"a": NaN, "b": [-Infinity, True, None]}'),
        "",
        [("f", {"a": "NaN", "b": ["-Infinity", True, None]})],
    ),
    ("hermes", hermes('{"a": "1\n2\t\\d"}'), "", [("f", {"a": "1\n2\t\\d"})]),
    ("hermes", hermes("[1, }"), hermes("[1, }"), []),
    ("hermes", "<tool_call>\nnothing</tool_call> x", "<tool_call>\nnothing</tool_call> x", []),
    ("hermes", f'<tool_call>{{"name": 5}}</tool_call>{HERMES}', '<tool_call>{"name": 5}</tool_call>', [OSLO]),
    ("hermes", '<tool_call>{"name": "\\ud83d"}', '<tool_call>{"name": "\\ud83d"}', []),
    ("nemotron", f"<TOOLCALL>[{JSON_OSLO}, {JSON_NOW}]</TOOLCALL>\n\nDone.", "Done.", [OSLO, NOW]),
    ("nemotron", f"<TOOLCALL>[{JSON_OSLO} and more]</TOOLCALL> x", "x", [OSLO]),
    ("granite", f"<|tool_call|>[{JSON_OSLO}, {JSON_NOW}]", "", [OSLO, NOW]),
    ("mistral", f"I look. [TOOL_CALLS] [{JSON_OSLO}, {JSON_NOW}] bye", "I look.bye", [OSLO, NOW]),
    ("mistral", '[TOOL_CALLS][{"name": "time-now", "arguments": {}, "id": "a1B2c3D4e"}]', "", [NOW]),
    ("mistral", '[TOOL_CALLS]weather[ARGS]{"city": "Oslo"}', "", [OSLO]),
    ("mistral", 'Hm.[TOOL_CALLS]weather[ARGS]{"city": "Oslo"}[TOOL_CALLS]time-now[ARGS]{}', "Hm.", [OSLO, NOW]),
    ("mistral", '[TOOL_CALLS]weather[CALL_ID]a1B2c3D4e[ARGS]{"city": "Oslo"}', "", [OSLO]),
    ("mistral", '[TOOL_CALLS]weather{"city": "Oslo"}', "", [OSLO]),
    ("mistral", "[TOOL_CALLS] is a marker [x]", "[TOOL_CALLS] is a marker [x]", []),
    ("llama3_json", JSON_OSLO.replace("arguments", "parameters"), "", [OSLO]),
    ("llama3_json", f"\n{JSON_OSLO}; {JSON_NOW}", "", [OSLO, NOW]),
    ("llama3_json", f"<|python_tag|>{JSON_OSLO}", "", [OSLO]),
    ("llama3_json", '<|python_tag|>{"name": "other", "parameters": {}}', "", [("other", {})]),
    ("llama3_json", '{"type": "function", "name": "time-now", "parameters": {}}', "", [NOW]),
    ("llama3_json", '{"name": "Alice", "age": 30}', '{"name": "Alice", "age": 30}', []),
    ("llama3_json", '{"name": "Alice", "parameters": {}}', '{"name": "Alice", "parameters": {}}', []),
    ("llama3_json", f'{JSON_OSLO}; {{"name": "Alice"}}', '; {"name": "Alice"}', [OSLO]),
    ("llama3_json", f"So: {JSON_OSLO}", f"So: {JSON_OSLO}", []),
    ("pythonic", "[weather(city='Oslo'), time-now()]", "", [OSLO, NOW]),
    ("pythonic", '<|python_start|>[weather(city="Oslo")]<|python_end|>', "", [OSLO]),
    ("pythonic", "<|python_start|>[other()]<|python_end|>", "", [("other", {})]),
    ("pythonic", "[link(a=1)](http://x)", "[link(a=1)](http://x)", []),
    ("pythonic", "[weather(as of now)](http://x)", "[weather(as of now)](http://x)", []),
    ("pythonic", "[weather(city='Oslo'), link(a=1)]", ", link(a=1)]", [OSLO]),
    ("lfm2", "<|tool_call_start|>[weather(city='Oslo')]<|tool_call_end|>I look.", "I look.", [OSLO]),
    (
        "lfm2",
        "<|tool_call_start|>[f(a={'b': [1, None]}, c=True, d=null, e=\"x\\\\\", g=-1.5, h=nan, i='a, b)')]"
        "<|tool_call_end|>",
        "",
        [("f", {"a": {"b": [1, None]}, "c": True, "d": None, "e": "x\\", "g": -1.5, "h": "nan", "i": "a, b)"})],
    ),
    (
        "lfm2",
        "<|tool_call_start|>[f(a='\\ud83d', b=[1e999])]<|tool_call_end|>",
        "",
        [("f", {"a": "\ud83d", "b": "[1e999]"})],
    ),
    ("qwen3_coder", f"I look.\n{XML_OSLO}\n{XML.format('')}", "I look.", [OSLO, ("weather", {})]),
    ("qwen3_coder", XML_OSLO.replace("</function>\n", ""), "", [OSLO]),
    (
        "qwen3_coder",
        xml(city="a < b\n</para> \\", days="3"),
        "",
        [("weather", {"city": "a < b\n</para> \\", "days": 3})],
    ),
    (
        "qwen3_coder",
        xml(city="", note="null", exact="True"),
        "",
        [("weather", {"city": "", "note": None, "exact": True})],
    ),
    ("qwen3_coder", xml(days="NaN", city="NaN"), "", [("weather", {"days": "NaN", "city": "NaN"})]),
    ("qwen3_coder", xml(size="3"), "", [("weather", {"size": 3})]),
    ("qwen3_coder", xml(days="1e999"), "", [("weather", {"days": "1e999"})]),
    ("qwen3_coder", xml(place='{"at": [NaN, 1]}'), "", [("weather", {"place": '{"at": [NaN, 1]}'})]),
    ("qwen3_coder", xml(place='{"at": "\\ud83d"}'), "", [("weather", {"place": {"at": "\ud83d"}})]),
    ("qwen3_coder", "<tool_call>\nno tags", "<tool_call>\nno tags", []),
]
_VALUES = list(ARGUMENTS.values())
for _name, _some in itertools.product(TEMPLATES, (_VALUES[:2], _VALUES[2:4], _VALUES[4:])):  # as templates write them
    _calls = [*(("weather", one) for one in _some), ("time-now", {})]
    _text, _after = (
        ("", "")
        if _name in BARE
        else ("I look. ", "" if _name in {"mistral", "mistral named", "granite"} else "\n Done.")
    )
    ANSWERS.append((_name, written(_name, _calls, _text) + _after, _text.strip() + _after.strip(), _calls))


@pytest.mark.parametrize(("name", "text", "content", "calls"), ANSWERS, ids=lambda value: repr(value)[:40])
class TestAnswers:
    def test_does_not_depend_on_pieces(self, name, text, content, calls):
        whole = read(name, [text])
        assert parsed(whole) == (content, calls)
        json.dumps(whole, ensure_ascii=False).encode()  # it can be sent
        assert read(name, text) == whole
        for i in range(1, len(text)):
            assert read(name, [text[:i], text[i:]]) == whole, i

    def test_cut_anywhere(self, name, text, content, calls):
        """Nothing leaks: content and arguments are beginnings of the whole's."""
        whole_content, whole_calls = read(name, [text])
        for i in range(len(text)):
            found_content, found_calls = read(name, [text[:i]], is_cut=True)
            assert whole_content.startswith(found_content.rstrip()), i
            assert [one for one, _ in found_calls] == [one for one, _ in whole_calls[: len(found_calls)]], i
            for (_, found), (_, whole) in zip(found_calls, whole_calls, strict=False):
                assert whole.startswith(found), i
            if not calls:
                continue
            stopped = read(name, [text[:i]])  # by the model: the beginning of an opening marker is text then
            assert stopped[1] == found_calls, i


def test_a_long_text_that_is_no_call():
    text = "<tool_call>" + "[" * 100_000
    assert read("hermes", [text[:50_000], text[50_000:]]) == (text, [])


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    pytest.importorskip("llguidance")
    tokenizer = TextTokenizer(EMBEDDED_MODEL_DIR)
    return Grammars(tokenizer, tokenizer.vocab_size)


THINK = reasoning.format_named("think")


def grammar(name: str, functions: tuple = (), calls: int = 9, thinking: tuple = (), **asked: object) -> str:
    """Return the grammar of answers in a format."""
    return grammar_of(AnswerFormat(form_of(name), functions, calls, *thinking), lambda _: None, **asked)


def is_accepted(grammars: Grammars, guidance: Callable[[str], str], name: str, text: str) -> bool:
    """Return whether a grammar accepts a whole text."""
    form = ResponseFormat(LARK, guidance(name))
    matcher, tokenizer = grammars.matcher(form), grammars._given
    try:
        matcher.take(tokenizer.tokenize_plain(text))
    except ValueError:
        return False
    end = tokenizer.eod
    return bool(matcher.allowed([end])[end // 8] >> end % 8 & 1)


@pytest.mark.parametrize("name", TEMPLATES)
class TestGrammars:
    @pytest.mark.parametrize("arguments", ARGUMENTS.values(), ids=ARGUMENTS)
    def test_calls_that_are_required(self, grammars, name, arguments):
        guidance = partial(grammar, functions=(WEATHER, TIME), must_call=True)
        for calls in ([("weather", arguments)], [("weather", arguments), ("time-now", {})]):
            assert is_accepted(grammars, guidance, name, written(name, calls))

    def test_what_is_required_is_enforced(self, grammars, name):
        must = partial(grammar, functions=(WEATHER, TIME), must_call=True)
        good = [("weather", {"city": "Oslo", "days": 3})]
        wrong = [
            written(name, [("weather", {"days": 3})]),
            written(name, [("weather", {"city": "Oslo", "days": "soon"})]),
            written(name, [("weather", {"city": "Oslo", "far": 1})]),
            written(name, [("wether", {"city": "Oslo"})]),
            "Hello",
            "",
            written(name, good)[:-4],
        ]
        assert is_accepted(grammars, must, name, written(name, good))
        assert [text for text in wrong if is_accepted(grammars, must, name, text)] == []
        one = partial(grammar, functions=(TIME,), must_call=True, calls=1)
        assert is_accepted(grammars, one, name, written(name, [("time-now", {})]))
        assert not is_accepted(grammars, one, name, written(name, good))
        assert not is_accepted(grammars, one, name, written(name, [("time-now", {}), ("time-now", {})]))

    def test_free_text_or_strict_calls(self, grammars, name):
        auto = partial(grammar, functions=(WEATHER, TIME))
        text = "" if name in BARE else "I look it up. "
        good = written(name, [("weather", {"city": "Oslo"})], text)
        assert is_accepted(grammars, auto, name, good)
        assert is_accepted(grammars, auto, name, "Hello, nothing to call.")
        assert is_accepted(grammars, auto, name, "")
        assert not is_accepted(grammars, auto, name, written(name, [("weather", {"town": "Oslo"})], text))

    def test_a_call_or_an_answer_of_a_schema(self, grammars, name):
        if name == "llama3_json":  # refused by `constrained_format`: both are bare JSON
            return
        schema = {"type": "object", "properties": {"degrees": {"type": "integer"}}, "required": ["degrees"]}
        either = partial(grammar, functions=(WEATHER,), schema=schema)
        assert is_accepted(grammars, either, name, '{"degrees": 12}')
        assert is_accepted(grammars, either, name, written(name, [("weather", {"city": "Oslo"})]))
        assert not is_accepted(grammars, either, name, '{"degrees": "x"}')
        assert not is_accepted(grammars, either, name, "12")

    def test_after_thinking(self, grammars, name):
        call = written(name, [("weather", {"city": "Oslo"})])
        for inside in (True, False):
            opening = "" if inside else "<think>"
            must = partial(grammar, functions=(WEATHER,), must_call=True, thinking=(THINK, inside))
            assert is_accepted(grammars, must, name, f"{opening}\nWhich city?\n</think>\n\n{call}")
            assert not is_accepted(grammars, must, name, f"{opening}\nWhich city?\n</think>\n\nOslo")
            assert is_accepted(grammars, must, name, call) is not inside


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "before"])
def test_thinking_within_a_budget(grammars, inside):
    """Only the closing marker is allowed at the budget, token by token; then the answer is free."""
    budget = ThinkingBudget(6, "</think>", None if inside else "<think>")
    source = grammar("hermes", thinking=(THINK, inside))
    tokenizer = grammars._given
    thought = tokenizer.tokenize_plain("" if inside else "<think>")
    thought += tokenizer.tokenize_plain("a b c d e f g h i j k l m n")[: 6 - len(thought)]
    assert len(thought) == 6
    matcher = grammars.matcher(ResponseFormat(LARK, source, budget))
    closing, end = tokenizer.tokenize_plain("</think>"), tokenizer.eod
    for token in thought:
        assert sum(map(int.bit_count, matcher.allowed([end]))) > 100
        matcher.take([token])
    for token in closing:
        allowed = matcher.copy().allowed([end])
        assert [i for i in range(tokenizer.vocab_size) if allowed[i // 8] >> i % 8 & 1] == [token]
        matcher.take([token])
    assert sum(map(int.bit_count, matcher.allowed([end]))) > 100
    matcher.take(tokenizer.tokenize_plain("</think> free"))

    early = grammars.matcher(ResponseFormat(LARK, source, budget))
    early.take([*([] if inside else tokenizer.tokenize_plain("<think>")), *closing])
    early.take(tokenizer.tokenize_plain("an answer longer than the budget of thinking"))
    assert sum(map(int.bit_count, early.allowed([end]))) > 100
    if not inside:
        without = grammars.matcher(ResponseFormat(LARK, source, budget))
        for token in tokenizer.tokenize_plain("an answer without thinking, longer than the budget"):
            without.take([token])
            assert sum(map(int.bit_count, without.allowed([end]))) > 100


@pytest.mark.parametrize("name", TEMPLATES)
def test_prescribed_text_has_the_tokens_of_the_next_prompt(grammars, name):
    """Prescribed text can be generated in the tokenizer's own tokens only."""
    schema = {"type": "object", "properties": {"level": {"enum": ["low", "high"]}}, "required": ["level"]}
    source = grammar(name, (Function("note", schema),), must_call=True, calls=1)
    tokenizer, matcher = grammars._given, grammars.matcher(ResponseFormat(LARK, source))
    expected = tokenizer.tokenize_plain(written(name, [("note", {"level": "low"})]))
    choices = 0
    for token in expected:
        allowed = matcher.allowed([tokenizer.eod])
        assert allowed[token // 8] >> token % 8 & 1
        choices += sum(map(int.bit_count, allowed)) > 1
        matcher.take([token])
    assert choices <= 3, "the level, and the end"


def test_arguments_that_refer_to_definitions(grammars):
    """Shared definitions of a schema hold in each argument, in formats that have arguments one by one."""
    schema = {
        "type": "object",
        "properties": {"at": {"$ref": "#/$defs/point"}},
        "required": ["at"],
        "$defs": {"point": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}},
    }
    guidance = partial(grammar, functions=(Function("go", schema),), must_call=True)
    for name in TEMPLATES:
        assert is_accepted(grammars, guidance, name, written(name, [("go", {"at": {"x": 1}})])), name
        assert not is_accepted(grammars, guidance, name, written(name, [("go", {"at": {"x": "1"}})])), name


# Patterns of JSON schemas (ECMA-262), texts that have them, and texts that have not.
PATTERNS = [
    (r"^\/api\/x$", ["/api/x"], ["x/api/x", "/api/"]),
    (r"^[^/]+/[^\/]+$", ["a/b"], ["a", "a/b/c"]),
    (r"^\d\D$", ["1a"], ["٣a", "11"]),
    (r"^\w+\W$", ["a_1 "], ["é", "a"]),
    (r"^[\w\-.]+$", ["a-b.c"], ["é", "a b"]),
    (r"^[\d-x]$", ["-", "3", "x"], ["a"]),
    (r"^[a-\d]$", ["a", "-", "5"], ["b"]),
    (r"^[a-z-9]$", ["b", "-", "9"], ["A"]),
    (r"^[\]\\[]$", ["]", "\\", "["], ["a"]),
    (r"^[^]$", ["a", "é"], ["", "ab"]),
    (r"^\u0041[\u4e00-\u9fff]\x41$", ["A東A"], ["A東", "東A"]),
    (r"^\ud83d\ude00$", ["😀"], ["x"]),
    (r"^\e\_\<\>\#\%\@\!\'\"\ \:\;\,\=\`\~\&$", ["e_<>#%@!'\" :;,=`~&"], ["e"]),
    (r"^\p{Lu}+$", ["ÄB"], ["a"]),
    (r"a\\$", ["a\\", "xa\\"], ["a", "a\\b"]),
    ("^a{,3}$", ["a{,3}"], ["aa"]),
    ("^a$|^b$", ["a", "b"], ["xb", "ax", "xbx"]),
    ("a|^b", ["a", "xa", "bx"], ["xb"]),
    ("(^|,)x", ["x", ",x", "y,xz"], ["yx"]),
    ("^(?:x($|,))", ["x", "x,b"], ["xb", "ax"]),
    (r"\Aa\Z", ["a"], ["ba", "ab"]),
    ("^(?<y>a)(b|c)?$", ["ab", "a"], ["b"]),
    ("", ["", "a"], []),
]


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder"])
@pytest.mark.parametrize(("pattern", "good", "bad"), PATTERNS, ids=lambda value: repr(value)[:20])
def test_patterns(grammars, name, pattern, good, bad):
    """A pattern is searched and not translated to another: in JSON, and in texts that no quotes surround."""
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": pattern}}, "required": ["a"]}
    guidance = partial(grammar, functions=(Function("f", schema, is_strict=True),), must_call=True)
    for text in (*good, *bad):
        call = written(name, [("f", {"a": text})])
        assert is_accepted(grammars, guidance, name, call) == (text in good), text


@pytest.mark.parametrize(
    ("schema", "reason", "kept"),
    [
        ({"type": "string", "format": "color"}, "Unknown format: color", None),
        ({"type": "array", "items": {"not": {}, "type": "string"}}, "Unimplemented keys", None),
        ({"oneOf": [{"type": "string"}, {"minLength": 2}]}, "oneOf", None),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around", {}),
        ({"type": "string", "format": 5, "minLength": -1}, "minLength", {}),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "unsatisfiable", {}),
        ({"$ref": "#/nowhere"}, "nowhere", {}),
        ({"type": "string", "format": "date", "pattern": "^2"}, "", None),
        ({"$ref": "#/properties/b"}, "", None),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_a_schema_guides_as_far_as_it_is_supported(grammars, schema, reason, kept):
    """S19: an argument whose schema is refused may have any value, and the others follow theirs."""
    b = {"type": "object", "properties": {"not": {"type": "integer"}}, "required": ["not"]}
    whole = {"type": "object", "properties": {"a": schema, "b": b}, "required": ["a", "b"]}
    part, found = supported_part(whole)
    assert part == whole | {"properties": {"a": schema if kept is None else kept, "b": b}}
    assert (found == "") == (reason == "")
    assert reason in found
    if kept == {} or not reason:
        return
    guidance = partial(grammar, functions=(Function("f", part),), must_call=True)
    value = ["x"] if schema.get("type") == "array" else "xy"
    for other, is_good in ((1, True), ("1", False)):
        call = written("hermes", [("f", {"a": value, "b": {"not": other}})])
        assert is_accepted(grammars, guidance, "hermes", call) == is_good


@pytest.mark.parametrize("schema", [{"type": "integer"}, {"not": {}}], ids=["supported", "in part"])
def test_arguments_of_a_schema_without_a_type_are_an_object(grammars, schema):
    """S19: clients leave the type of the parameters out."""
    part, _ = supported_part({"properties": {"a": schema}})
    guidance = partial(grammar, functions=(Function("f", part),), must_call=True)
    calls = [written("hermes", [("f", arguments)]) for arguments in ({"a": 1}, 1)]
    assert [is_accepted(grammars, guidance, "hermes", call) for call in calls] == [True, False]
