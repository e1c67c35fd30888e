"""Tokenizers of chat models: the ids that transformers gives, and conversations as transformers renders them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer, ProcessorMixin

from megatron_ext.errors import ConfigError
from megatron_ext.text.chat_template import INVALID_JSON, LONGEST_VARIABLE, ChatOptions
from megatron_ext.text.tokenizer import TextTokenizer
from megatron_ext.text.tokenizer_files import copy_tokenizer_files
from tests.unit_tests.support import hf_tokenizers

KINDS = {"Llama 2": hf_tokenizers.llama_2, "Llama 3": hf_tokenizers.llama_3}
TEXTS = (*hf_tokenizers.SENTENCES, "", " two  spaces\n\tand a tab ", "héllo 世界 🦊")

# In the manner of the two families; Jinja's own features and the helpers that transformers adds.
HEADERS = """{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""
INSTRUCTIONS = """{% if messages[0]['role'] == 'system' %}
{% set turns = messages[1:] %}
{% else %}
{% set turns = messages %}
{% endif %}
{% for message in turns %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('roles must take turns') }}
{% endif %}
{% if message['role'] == 'user' %}
{{ bos_token + '[INST] ' + message['content'] + ' [/INST]' }}
{% else %}
{{ ' ' + message['content'] + ' ' + eos_token }}
{% endif %}
{% endfor %}
"""
HELPERS = """{% for message in messages %}{% if loop.index > 2 %}{% break %}{% endif %}
{{ message | tojson }} {{ message['content'] | tojson(indent=2) }}
{% endfor %}{% generation %}{{ strftime_now('%Y') }}{% endgeneration %}{{ tools is none }}{{ unk_token }}"""
ALL_TEMPLATES = {"headers": HEADERS, "instructions": INSTRUCTIONS, "helpers": HELPERS}
QUESTION = [{"role": "user", "content": " What is the capital of France? "}]
CONVERSATION = [
    {"role": "system", "content": "Be brief, <b>please</b>."},
    *QUESTION,
    {"role": "assistant", "content": "Paris\n", "name": None},
    {"role": "user", "content": "And of 日本?"},
]


@pytest.fixture(params=KINDS)
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return KINDS[request.param](tmp_path / "tokenizer")


def write_template(directory: Path, template: object) -> None:
    """Into `tokenizer_config.json`, where older files have it."""
    file = directory / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": template}))


def test_ids_and_texts_are_those_of_transformers(directory: Path) -> None:
    ours, theirs = TextTokenizer(directory), AutoTokenizer.from_pretrained(directory)
    assert (ours.bos, ours.eod) == (theirs.bos_token_id, theirs.eos_token_id)
    for text in TEXTS:
        ids = ours.tokenize(text)
        assert ids == theirs(text).input_ids
        assert ids[0] == ours.bos
        assert len(ids) > 1 or not text
        for skip in (True, False):
            assert ours.detokenize(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert ours.detokenize(ours.tokenize(TEXTS[0])) == TEXTS[0]


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("messages", [QUESTION, CONVERSATION], ids=["question", "conversation"])
@pytest.mark.parametrize("template", ALL_TEMPLATES)
def test_rendered_as_by_transformers(
    template: str, messages: list, add_generation_prompt: bool, directory: Path
) -> None:
    (directory / "chat_template.jinja").write_text(ALL_TEMPLATES[template])
    theirs = AutoTokenizer.from_pretrained(directory)
    expected = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
    ours = TextTokenizer(directory)
    assert ours.chat_template == theirs.chat_template
    assert ours.apply_chat_template(messages, add_generation_prompt=add_generation_prompt) == expected
    assert "France" in expected


def test_messages_of_tools(directory: Path) -> None:
    """A call of a tool has no content, and parts of a content are up to the template."""
    template = "{% for m in messages %}{{ m | tojson }}{% endfor %}{#- tool_calls -#}"
    (directory / "chat_template.jinja").write_text(template)
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "look_up"}]}
    parts = {"role": "tool", "content": [{"type": "text", "text": "Paris"}]}
    assert TextTokenizer(directory).apply_chat_template([call, parts]) == (
        '{"role": "assistant", "tool_calls": [{"name": "look_up"}]}'
        '{"role": "tool", "content": [{"type": "text", "text": "Paris"}]}'
    )


def test_arguments_that_are_no_object_are_shown_as_they_are(directory: Path) -> None:
    """A template that writes JSON shows the text itself; one that writes members has one for it."""
    (directory / "chat_template.jinja").write_text(
        "{% set given = messages[0].tool_calls[0].function.arguments %}{{ given | tojson }}{{ given.INVALID_JSON }}"
    )
    call = {"function": {"name": "look_up", "arguments": {INVALID_JSON: '{"city": "Par'}}}
    found = TextTokenizer(directory).apply_chat_template([{"role": "assistant", "tool_calls": [call]}])
    assert found == '{"city": "Par' * 2


@pytest.mark.parametrize("name", ["a-b", "a" * (LONGEST_VARIABLE + 1), "bos_token"])
def test_names_that_a_variable_cannot_have(name: str) -> None:
    with pytest.raises(ConfigError, match=f"^chat_template_kwargs: '?{name[:LONGEST_VARIABLE]}"):
        ChatOptions(variables={name: 1}).check()


def test_where_the_template_is(directory: Path) -> None:
    """A file of its own decides over the configuration; of several the default one."""

    def template() -> str | None:
        assert TextTokenizer(directory).chat_template == AutoTokenizer.from_pretrained(directory).chat_template
        return TextTokenizer(directory).chat_template

    assert template() is None
    write_template(directory, "config")
    assert template() == "config"
    assert TextTokenizer(directory / "tokenizer.json").chat_template == "config"
    several = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "usual"}]
    write_template(directory, several)
    assert TextTokenizer(directory).apply_chat_template(QUESTION) == "usual"
    (directory / "chat_template.jinja").write_text("file\n")
    assert template() == "file\n"


USUAL, TOOLS, RAG = "usual {{ messages | length }}", "tools {{ tools | length }}", "rag"
LISTED = [{"name": name, "template": text} for name, text in (("tool_use", TOOLS), ("default", USUAL))]
LAYOUTS: dict[str, tuple[object, dict[str, str]]] = {  # template of the configuration, and files
    "one": (USUAL, {}),
    "list": (LISTED, {}),
    "list without default": (LISTED[:1], {}),
    "files": (None, {"chat_template.jinja": USUAL, "additional_chat_templates/tool_use.jinja": TOOLS}),
    "files and list": (LISTED, {"chat_template.jinja": RAG}),
    "files without default": (USUAL, {"additional_chat_templates/tool_use.jinja": TOOLS}),
    "other names": (None, {"chat_template.jinja": USUAL, "additional_chat_templates/rag.jinja": RAG}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_named_templates_are_chosen_as_by_transformers(layout: str, directory: Path, tmp_path: Path) -> None:
    """S16: with and without tools; a copy has the same ones."""
    template, files = LAYOUTS[layout]
    write_template(directory, template)
    for name, text in files.items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text(text)
    (copy := tmp_path / "copy").mkdir()
    copy_tokenizer_files(directory, copy)
    theirs = AutoTokenizer.from_pretrained(directory)
    chosen = []
    for tools in (None, [{"type": "function", "function": {"name": "f"}}]):
        options = ChatOptions(tools=tools or ())
        for path in (directory, copy):
            ours = TextTokenizer(path)
            try:
                expected = theirs.get_chat_template(tools=tools)
            except ValueError:
                expected = None
                with pytest.raises(ConfigError, match=r"none of the chat templates .* is named 'default'"):
                    ours.apply_chat_template(QUESTION, options=options)
            else:
                assert ours.chat_templates.chosen(has_tools=bool(tools)) == expected
                rendered = theirs.apply_chat_template(QUESTION, tools=tools, tokenize=False)
                if expected == TOOLS:
                    assert ours.apply_chat_template(QUESTION, options=options) == rendered
        chosen.append(expected)
    assert len(set(chosen)) == 1 + (TOOLS in chosen)


def test_a_template_of_a_processor(directory: Path) -> None:
    """`chat_template.json` is read as processors read it, if there is no other template."""
    (directory / "chat_template.json").write_text(json.dumps({"chat_template": USUAL}))
    theirs = ProcessorMixin.get_processor_dict(directory)[0]["chat_template"]
    assert TextTokenizer(directory).chat_template == theirs == USUAL
    write_template(directory, RAG)
    assert TextTokenizer(directory).chat_template == AutoTokenizer.from_pretrained(directory).chat_template == RAG


def test_a_template_that_a_user_gives(directory: Path, tmp_path: Path) -> None:
    """It serves all conversations; what is no template is refused with the tokenizer."""
    write_template(directory, LISTED)
    file = tmp_path / "given.jinja"
    with pytest.raises(ConfigError, match=rf"^--chat-template {file}: No such file"):
        TextTokenizer(directory, file)
    for text in ("{% if %}", "{{ x | no_such_filter }}", "{% for %}{% generation %}"):
        file.write_text(text)
        with pytest.raises(ConfigError, match=rf"^--chat-template {file}: the chat template is broken, line 1: "):
            TextTokenizer(directory, file)
    file.write_text("{% generation %}given{% endgeneration %}")
    tokenizer = TextTokenizer(directory, file)
    for options in (ChatOptions(), ChatOptions(tools=[{}])):
        assert tokenizer.apply_chat_template(QUESTION, options=options) == "given"


def test_special_tokens_of_older_files(directory: Path) -> None:
    """Special tokens are read from a file of their own if the configuration does not have them."""
    write_template(directory, "{{ bos_token }} and {{ eos_token }}{{ pad_token is defined }}")
    expected = TextTokenizer(directory).apply_chat_template(QUESTION)
    assert expected in ("<s> and </s>False", "<|begin_of_text|> and <|eot_id|>False")
    file = directory / "tokenizer_config.json"
    fields = json.loads(file.read_text())
    tokens = {name: fields.pop(name) for name in ("bos_token", "eos_token")}
    file.write_text(json.dumps(fields))
    assert TextTokenizer(directory).apply_chat_template(QUESTION) == " and False"
    (directory / "special_tokens_map.json").write_text(json.dumps(tokens))
    assert TextTokenizer(directory).apply_chat_template(QUESTION) == expected
    file.write_text(json.dumps(fields | tokens))
    (directory / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<old>"}))
    assert TextTokenizer(directory).apply_chat_template(QUESTION) == expected


def test_no_effort_is_no_thinking() -> None:
    """Templates that know the switch only get the switch; what a request sets itself stays."""
    template, none = "{{ enable_thinking }}", {"reasoning_effort": "none"}
    assert ChatOptions(**none).known_to(template) == ({"enable_thinking": False}, [])
    own = {"enable_thinking": True}
    assert ChatOptions(variables=own, **none).known_to(template) == (own, [])
    assert ChatOptions(reasoning_effort="high").known_to(template) == ({}, ["reasoning_effort"])


def refused(directory: Path, template: str | None, messages: object) -> str:
    """The one line that says why."""
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)
    tokenizer = TextTokenizer(directory)
    with pytest.raises(ConfigError) as caught:
        tokenizer.apply_chat_template(messages)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([], "messages must be a list of at least one"),
        ({"role": "user", "content": "hello"}, "messages must be a list of at least one"),
        (["hello"], "message 0 is of type str; it must have a role and a content"),
        ([*QUESTION, {"content": "hello"}], "message 1 has role None; it must be a text"),
        ([{"role": 1, "content": "hello"}], "message 0 has role 1"),
        ([{"role": "user"}], "message 0 (user) has no content"),
        ([{"role": "user", "content": 17}], "message 0 (user) has a content of type int; it must be a text"),
    ],
    ids=str,
)
def test_messages_that_are_none(messages: object, expected: str, directory: Path) -> None:
    assert refused(directory, HEADERS, messages).startswith(expected)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (INSTRUCTIONS, "the chat template refuses the messages: roles must take turns"),
        ("{{ messages[7].content.text }}", "the chat template refuses the messages: "),
        ("{{ messages[0]['content'] + 1 }}", "the chat template refuses the messages: "),
        ("{{ ''.__class__.__mro__ }}{{ ''.__class__.__mro__[1].__subclasses__() }}", "the chat template refuses"),
        ("text\n{% for message in messages %}", "the chat template is broken, line 2: "),
    ],
    ids=["turns", "undefined", "type", "sandbox", "syntax"],
)
def test_templates_that_refuse(template: str, expected: str, directory: Path) -> None:
    answers = [{"role": "assistant", "content": "Paris"}, *QUESTION]
    assert refused(directory, template, answers).startswith(expected)
