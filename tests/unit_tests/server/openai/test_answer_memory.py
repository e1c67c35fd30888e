"""SA-15: the next turn of a chat begins with the token ids that the turns before it read and wrote."""

from __future__ import annotations

import asyncio
import dataclasses
from array import array
from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from megatron_ext.errors import ConfigError
from megatron_ext.server.openai.chat import ChatFormat
from megatron_ext.server.openai.chat_prompt import AnsweredChat, AnswerMemory, ChatPrompt, Conversation
from megatron_ext.server.openai.protocol import Message
from megatron_ext.server.serving import Serving
from megatron_ext.text.chat_template import ChatOptions
from megatron_ext.text.tool_calls.formats import HERMES, AnswerFormat
from megatron_ext.text.tool_calls.functions import Function
from tests.on_request import long_except
from tests.unit_tests.support.agent_loop import TOOLS, WITHOUT_TOOLS
from tests.unit_tests.support.chat_turns import TURNS, ask, play_all, post, rendered, sent_back
from tests.unit_tests.support.server import LiveServer, embedded_engine
from tests.unit_tests.text.test_control_tokens import KINDS, Kind

MESSAGES = [{"role": "system", "content": "Answer with care. " * 4}, {"role": "user", "content": "Go."}]


@pytest.fixture(scope="module")
def roomy(serve) -> LiveServer:
    return serve(embedded_engine(explain_prefix_cache=True), "embedded")


@pytest.fixture
def server(roomy) -> LiveServer:
    return roomy


@pytest.mark.parametrize("chats", long_except([6], [6, 200]))
def test_each_turn_resumes_where_the_last_one_ended(server, chats):
    counts = play_all(server, range(chats))
    assert counts["resumed"] >= 4 * chats, counts
    rest = counts["retokenized after length"] + counts["a special token"]  # calls cut off; in the middle of a text
    assert counts["resumed"] + rest == (TURNS - 1) * chats, counts


SENTENCE, END = 'Naïve  cats\nsay {"a": 1}.', "<|end|>"
FIRST, MORE = {"role": "user", "content": "Say it."}, {"role": "user", "content": "Once more."}
CALL = {"type": "function", "function": {"name": "lookup", "arguments": '{"city": "Oslo", "days": 3}'}}
SPELLED = '<tool_call>\n{"name":"lookup","arguments":{"days":3,"city":"O\\u0073lo"}}\n</tool_call>'


class Chats:
    """Conversations of a serving, and answers that it remembers; each answer is tokenized by character."""

    def __init__(self, serving: Serving) -> None:
        self.serving = serving
        self.options = ChatOptions(tools=TOOLS)

    def prompt(self, messages: list[dict], scope: str | None = None) -> ChatPrompt:
        return asyncio.run(self.serving.read_chat(self.conversation(messages, scope)))

    def conversation(self, messages: list[dict], scope: str | None = None) -> Conversation:
        return asyncio.run(self.serving.conversation([Message(**one) for one in messages], self.options, scope))

    def plain(self, messages: list[dict]) -> list[int]:
        """The ids without a memory."""
        return rendered(self.serving.chat_format, [Message(**one) for one in messages], self.options).ids()

    def answer(
        self, text: str, messages: Sequence[dict] = (FIRST,), scope: str | None = None, end: str = END, cut: str = ""
    ) -> list[int]:
        """Remember an answer; return the ids through it. `cut` is generated after the text, and not a part of it."""
        encode = self.serving.tokenizer.tokenize_plain
        prompt = self.prompt(list(messages), scope)
        ids = [token for one in text + cut for token in encode(one)] + encode(end)
        functions = tuple(Function(one["function"]["name"], one["function"]["parameters"]) for one in TOOLS)
        form = AnswerFormat(HERMES, functions, 9, self.serving.chat_format.reasoning)
        fields = {"prompt_tokens": tuple(prompt.ids), "generated_tokens": tuple(ids)}
        self.serving.remember(
            prompt, form, self.serving.answers.put, SimpleNamespace(**fields, generated_text=text, finish_reason="stop")
        )
        return prompt.ids + ids[: len(ids) - bool(end)]

    def text(self, ids: list[int]) -> str:
        return self.serving.vocabulary.detokenize(ids, skip_special_tokens=False)


@pytest.fixture
def chats(roomy, monkeypatch, request) -> Chats:
    """Conversations with the embedded model's template, or with that of a parameter."""
    if (template := getattr(request, "param", None)) is not None:
        roomy.use_template(monkeypatch, template)
    monkeypatch.setattr(roomy.serving, "answers", AnswerMemory(2**20))
    return Chats(roomy.serving)


TEMPLATES = pytest.mark.parametrize("chats", [None, WITHOUT_TOOLS], ids=["own", "without tools"], indirect=True)


def said(text: str | None, **fields: object) -> dict:
    return {"role": "assistant", "content": text, **fields}


class TestSplices:
    """The ids of an answer are used where it is the answer of this conversation."""

    def continued(self, chats: Chats, known: list[int], messages: list[dict], scope: str | None = None) -> bool:
        """Return whether the prompt begins with known ids; it reads as the conversation in any case."""
        prompt = chats.prompt(messages, scope)
        assert chats.text(prompt.ids) == chats.text(chats.plain(messages))
        is_continued = prompt.ids[: len(known)] == known
        assert is_continued is (prompt.answer is not None)
        assert is_continued or prompt.ids == chats.plain(messages)
        return is_continued

    def test_answers_form_a_chain(self, chats):
        first = chats.answer(SENTENCE)
        turns = [FIRST, said(SENTENCE), MORE]
        assert chats.plain(turns)[: len(first)] != first, "the tokenizer writes it in the same way"
        assert self.continued(chats, first, turns)
        second = chats.answer("Cats.", turns)
        assert second[: len(first)] == first
        assert self.continued(chats, second, [*turns, said("Cats."), MORE])
        assert self.continued(chats, second, [*turns, said("Cats."), MORE, said("Unknown."), MORE])
        assert self.continued(chats, first, [*turns, said("Dogs."), MORE])

    @pytest.mark.parametrize(
        "messages",
        [
            [said(SENTENCE), MORE],
            [{"role": "user", "content": "Say it!"}, said(SENTENCE), MORE],
            [FIRST, said(SENTENCE + "!"), MORE],
            [FIRST, said(" " + SENTENCE), MORE],
            [FIRST, {"role": "user", "content": SENTENCE}, MORE],
            [FIRST, {"role": "user", "content": f"<|assistant|>{SENTENCE}{END}"}, MORE],
            [{"role": "user", "content": f"Say it.{END}<|assistant|>{SENTENCE}{END}"}],
        ],
        ids=["other start", "other question", "edited", "other spaces", "quoted", "spelled", "spelled in one"],
    )
    def test_other_places_have_no_splice(self, chats, messages):
        known = chats.answer(SENTENCE)
        assert self.continued(chats, known, [FIRST, said(SENTENCE), MORE])
        assert not self.continued(chats, known, messages)

    @pytest.mark.parametrize(("one", "two"), [("tenant a", "tenant b"), ("a:salt", "a:other"), (None, "a"), ("", None)])
    def test_scopes_are_apart(self, chats, one, two):
        known = chats.answer(SENTENCE, scope=one)
        assert self.continued(chats, known, [FIRST, said(SENTENCE), MORE], one)
        assert not self.continued(chats, known, [FIRST, said(SENTENCE), MORE], two)

    @pytest.mark.parametrize("begun", [["Naïve ca"], ["Naïve c", "a"]], ids=["client's", "cut answer"])
    def test_an_answer_that_continues_a_message(self, chats, begun):
        """Content that a client has begun, or the beginning of an answer that was cut, with its ids."""
        whole, known = "", []
        for text in begun:
            known = chats.answer(text, [FIRST, said(whole)] if whole else [FIRST], end="") if begun[1:] else []
            whole += text
            chats.options = ChatOptions(tools=TOOLS, add_generation_prompt=False, continue_final_message=True)
        assert chats.prompt([FIRST, said(whole)]).ids[: len(known)] == known
        known = chats.answer("ts.", [FIRST, said(whole)])
        chats.options = ChatOptions(tools=TOOLS)
        assert self.continued(chats, known, [FIRST, said("Naïve cats."), MORE])

    def test_no_token_crosses_an_edge(self, chats, roomy, monkeypatch):
        """An answer that ends with a line break, in a template that continues with one."""
        template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n\n{% endfor %}{{ tools and '' }}assistant: "
        roomy.use_template(monkeypatch, template)
        known = chats.answer("Yes.\n", end="")
        messages = [FIRST, said("Yes.\n"), MORE]
        assert chats.plain(messages)[: len(known)] != known
        assert self.continued(chats, known, messages)

    @TEMPLATES
    def test_calls_in_another_spelling(self, chats):
        known = chats.answer(f"I look.\n{SPELLED}")
        told = {"role": "tool", "content": "cold"}
        for arguments in ('{"city": "Oslo", "days": 3}', '{"days":3,"city":"\\u004fslo"}'):
            call = {"type": "function", "function": {"name": "lookup", "arguments": arguments}}
            prompt = chats.prompt([FIRST, said("I look.", tool_calls=[call]), told])
            assert prompt.ids[: len(known)] == known
            assert prompt.retokenized is None
            assert chats.text(prompt.ids[len(known) :]).startswith(f"{END}<|user|><tool_response>")
        for arguments in ('{"city": "Rome", "days": 3}', '{"city": "Oslo", "days": "3"}', '{"city": "Oslo"'):
            call = {"type": "function", "function": {"name": "lookup", "arguments": arguments}}
            assert not self.continued(chats, known, [FIRST, said("I look.", tool_calls=[call]), told])

    @TEMPLATES
    def test_turns_after_calls_in_another_spelling(self, chats):
        """The chain goes on through each of them, and ends where an earlier turn is edited."""
        messages, known = [FIRST], []
        for turn in range(3):
            known = chats.answer(SPELLED, messages)
            messages = [*messages, said(None, tool_calls=[CALL]), {"role": "tool", "content": f"cold {turn}"}]
            prompt = chats.prompt(messages)
            assert prompt.ids[: len(known)] == known
            assert prompt.retokenized is None
        edited = [*messages[:2], {"role": "tool", "content": "warm"}, *messages[3:]]
        assert chats.prompt(edited).ids[: len(known)] != known
        known, messages = chats.answer("Cold.", messages), [*messages, said("Cold."), MORE]
        assert chats.prompt(messages).ids[: len(known)] == known
        chats.options = ChatOptions(tools=TOOLS[::-1])  # another beginning of the prompt, for the same messages
        assert chats.prompt(messages).ids == chats.plain(messages)

    @pytest.mark.parametrize("turns", [1, 2])
    def test_ids_that_another_tokenizer_reads_otherwise_are_not_used(self, chats, turns):
        """A router may keep answers of replicas that another model has replaced; calls in another spelling, too."""
        messages, known = [FIRST], []
        for _ in range(turns):
            known = chats.answer(SPELLED, messages)
            messages = [*messages, said(None, tool_calls=[CALL]), {"role": "tool", "content": "cold"}]
        assert chats.prompt(messages).ids[: len(known)] == known
        memory, key = chats.serving.answers, chats.prompt(messages).answer
        answered = memory.find([key])[key]
        ids = answered.ids[:]
        ids[5] += 1  # in the prompt
        memory.put(key, dataclasses.replace(answered, ids=ids), None)
        assert chats.prompt(messages).ids[: len(ids)] != ids.tolist()
        assert chats.prompt(messages).answer != key

    def test_a_rest_that_reads_otherwise_is_not_used(self, chats):
        """Tokenizer that writes a space before each text."""
        known = chats.answer(SENTENCE)
        assert self.continued(chats, known, [FIRST, said(SENTENCE), MORE])
        conversation = chats.conversation([FIRST, said(SENTENCE), MORE])
        whole, tokenize = conversation.chat, chats.serving.tokenizer.tokenize_plain
        conversation.chat = dataclasses.replace(whole, ids_from=lambda start: tokenize(" " + whole.text[start:]))
        prompt = asyncio.run(chats.serving.read_chat(conversation))
        assert prompt.answer is None
        assert prompt.ids == whole.ids()

    def test_a_stop_string_cuts_a_token(self, chats):
        known = chats.answer("One, two", cut=", three")
        messages = [FIRST, said("One, two"), MORE]
        prompt = chats.prompt(messages)
        assert prompt.ids == chats.plain(messages)
        start, end = prompt.retokenized
        assert prompt.ids[:start] == known[:start]
        assert prompt.ids[start] != known[start]
        assert end == len(known)


@pytest.mark.parametrize("name", KINDS)
def test_tokenizers(tmp_path, name):
    """A prompt continues known ids if it then reads as the rendered text: never with SentencePiece's added spaces."""
    tokenizer = Kind(name, tmp_path / "t").tokenizer
    question = [{"role": "user", "content": "fox"}]
    messages = [*question, said("dog"), {"role": "user", "content": "cat"}]
    before = tokenizer.render_chat(question)
    text = tokenizer.render_chat(messages[:2], options=ChatOptions(False)).text.removeprefix(before.text)
    answer = text[: text.index("dog")]
    form = ChatFormat(tokenizer)
    start = Conversation(question, None, form, ChatOptions()).tokenize({})
    written = [token for part in (answer, "d", "og") for token in tokenizer.tokenize_plain(part)]
    known = [*start.ids, *written]
    conversation = Conversation(messages, None, form, ChatOptions())
    prompt = conversation.tokenize({conversation.places[1]: start.answered(written, form)})
    whole = conversation.chat
    read = tokenizer.detokenize(prompt.ids, skip_special_tokens=False)
    assert (prompt.ids[: len(known)] == known) is (prompt.answer is not None)
    assert (prompt.answer is not None) is (name in ("Llama 3", "Llama 3, turns", "embedded")), (read, whole.text)
    assert prompt.answer is None or read.removeprefix("<|begin_of_text|>") == whole.text.removeprefix(
        "<|begin_of_text|>"
    )


def test_all_routes_agree(server):
    """Chat, completions' tokens, Responses and Messages count the same prompt after an answer of the model's."""
    choice, prompt, _ = ask(server, MESSAGES, 3, cache_salt="routes")
    text, more = choice["message"]["content"], {"role": "user", "content": "More."}
    chat = [*MESSAGES, sent_back(choice), more]
    ids = post(server, "/tokenize", {"messages": chat, "cache_salt": "routes"})["tokens"]
    assert ids[: len(prompt) + len(choice["token_ids"])] == prompt + choice["token_ids"]
    assert post(server, "/tokenize", {"messages": chat})["tokens"] != ids
    body = {"input": chat, "cache_salt": "routes", "return_token_ids": True}
    assert post(server, "/v1/responses/input_tokens", body)["prompt_token_ids"] == ids
    body = {"system": MESSAGES[0]["content"], "messages": chat[1:], "cache_salt": "routes"}
    assert post(server, "/v1/messages/count_tokens", body)["input_tokens"] == len(ids)
    assert ask(server, chat, 4, cache_salt="routes")[1] == ids
    assert text


def test_a_retokenized_answer_is_explained(server):
    """A client that strips an answer: what follows is computed, and the count and the explanation say why."""
    server.reset_cache()
    choice, prompt, _ = ask(server, MESSAGES, 1, stop=[" "], max_tokens=90, min_tokens=40)
    known = prompt + choice["token_ids"]
    turns = [*MESSAGES, sent_back(choice), {"role": "user", "content": "More. " * 20}]
    after, ids, details = ask(server, turns, 2)
    place = next(i for i, (a, b) in enumerate(zip(known, ids, strict=False)) if a != b)
    assert details["computed_tokens_by_reason"]["retokenized"] > 0
    explanation = after["prefix_cache_explanation"]
    assert (explanation["reason"], explanation["agreeing"]) == ("retokenized", place)


class TestMemory:
    def entry(self, size: int) -> AnsweredChat:
        return AnsweredChat(array("i", [0] * size), "", 0, b"", b"")

    def test_is_bounded(self):
        memory = AnswerMemory(10 * self.entry(100).size)
        for number in range(100):
            memory.put(b"%d" % number, self.entry(100), None)
            assert memory.used_bytes <= 10 * self.entry(100).size
        assert len(memory) == 10
        memory.put(b"large", self.entry(10_000), None)
        assert len(memory) == 10

    def test_drops_the_least_recently_used_and_first_what_an_answer_continues(self):
        memory = AnswerMemory(3 * self.entry(100).size)
        for key in (b"a", b"b", b"c"):
            memory.put(key, self.entry(100), None)
        memory.use(b"a")
        memory.put(b"d", self.entry(100), b"c")
        assert set(memory._entries) == {b"a", b"b", b"d"}
        memory.put(b"e", self.entry(100), None)
        assert set(memory._entries) == {b"a", b"d", b"e"}

    def test_the_latest_are_found_up_to_a_size(self):
        memory, size = AnswerMemory(2**20), self.entry(100).size
        for key in (b"a", b"b", b"c"):
            memory.put(key, self.entry(100), None)
        keys = (b"c", b"none", b"b", b"a")
        assert [list(memory.find(keys, most)) for most in (0, size, 2 * size, None)] == [
            [b"c"],
            [b"c"],
            [b"c", b"b"],
            [b"c", b"b", b"a"],
        ]


class TestSentIds:
    """Megatron's fields: a conversation carries the token ids of its last answer."""

    def answered(self, server: LiveServer) -> tuple[list[dict], list[int]]:
        choice, prompt, _ = ask(server, MESSAGES, 5, cache_salt="trainer", tools=TOOLS, tool_choice="none")
        message = choice["message"]
        assert message["prompt_token_ids"] == choice["prompt_token_ids"] == prompt
        assert message["generation_token_ids"] == choice["generation_token_ids"] == choice["token_ids"]
        return [*MESSAGES, message, {"role": "user", "content": "More."}], prompt + choice["token_ids"]

    def tokens(self, server: LiveServer, messages: list[dict], **fields: object) -> list[int]:
        return post(server, "/tokenize", {"messages": messages, "tools": TOOLS, **fields})["tokens"]

    def test_are_used_without_a_memory(self, server):
        messages, known = self.answered(server)
        assert self.tokens(server, messages)[: len(known)] == known
        assert self.tokens(server, messages, prevent_retokenization=False)[: len(known)] != known

    @pytest.mark.parametrize(
        ("field", "change"),
        [
            ("prompt_token_ids", lambda ids: [*ids[:-2], *ids[-1:]]),
            ("generation_token_ids", lambda ids: ids[:3]),
            ("generation_token_ids", lambda ids: [*ids[:3], 10**9]),
        ],
    )
    def test_other_ids_are_refused_by_name(self, server, field, change):
        messages, _ = self.answered(server)
        messages[-2] = {**messages[-2], field: change(messages[-2][field])}
        answer = server.http.post("/tokenize", json={"messages": messages, "tools": TOOLS})
        assert answer.status_code == 400
        assert field in answer.text or "1000000000" in answer.text

    @pytest.mark.parametrize("carriers", ["all", "the last"])
    def test_after_calls_in_another_spelling(self, chats, carriers):
        """The ids of all answers verify each other; those of the last alone need the memory."""
        messages: list[dict] = [FIRST]
        for turn in range(3):
            prompt = chats.prompt(messages).ids
            known = chats.answer(SPELLED, messages)
            ids = {
                "prompt_token_ids": prompt,
                "generation_token_ids": [*known[len(prompt) :], chats.serving.chat_format.end_of_turn],
            }
            messages = [*messages, said(None, tool_calls=[CALL], **ids), {"role": "tool", "content": f"cold {turn}"}]
        if carriers == "the last":
            for message in messages[:-2]:
                message.pop("prompt_token_ids", None)
        assert chats.prompt(messages).ids[: len(known)] == known
        chats.serving.answers = AnswerMemory(2**20)
        if carriers == "all":
            assert chats.prompt(messages).ids[: len(known)] == known
            messages[1]["generation_token_ids"] = messages[1]["generation_token_ids"][:-9]
        with pytest.raises(ConfigError, match=r"messages.5.prompt_token_ids do not read"):
            chats.prompt(messages)
