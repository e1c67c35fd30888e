"""PY-3: forms of a prompt, and of several prompts."""

from __future__ import annotations

import array

import numpy
import pytest
import torch

from megatron_ext import ConfigError, RequestParams
from megatron_ext.api.prompt_input import PromptReader
from megatron_ext.text.grammars import Grammars
from megatron_ext.text.tokenizer import NullTokenizer
from megatron_ext.text.vocabulary import Vocabulary

DEFAULTS = RequestParams(num_tokens_to_generate=3)
TOKENIZER = NullTokenizer(100)
READER = PromptReader(TOKENIZER, Vocabulary(TOKENIZER, 100), Grammars(TOKENIZER, 100), DEFAULTS)
GREEDY, SAMPLED = RequestParams(), RequestParams(temperature=1.0)


def tokens(prompts) -> list[tuple[int, ...]]:
    return [one.prompt_tokens for one in READER.read_all(prompts, None)]


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ("7 8", [(7, 8)]),
        (["7 8"], [(7, 8)]),
        (["7 8", "9"], [(7, 8), (9,)]),
        ([7, 8], [(7, 8)]),
        ((7, 8), [(7, 8)]),
        ([[7, 8]], [(7, 8)]),
        ([[7, 8], [9]], [(7, 8), (9,)]),
        (["7 8", [9], (1, 2)], [(7, 8), (9,), (1, 2)]),
        ([], []),
        ((), []),
        ((one for one in ["7 8", [9]]), [(7, 8), (9,)]),
        (range(3), [(0, 1, 2)]),
        (torch.tensor([7, 8]), [(7, 8)]),
        (torch.tensor([[7, 8], [9, 1]]), [(7, 8), (9, 1)]),
        (numpy.array([7, 8]), [(7, 8)]),
        ([numpy.int64(7), 8], [(7, 8)]),
        ([torch.tensor(7), torch.tensor(8)], [(7, 8)]),
        ([torch.tensor([7, 8]), "9"], [(7, 8), (9,)]),
        (array.array("i", [7, 8]), [(7, 8)]),
    ],
    ids=lambda value: repr(value).split(" at 0x")[0],
)
def test_one_or_several(prompts, expected):
    """PY-3: a lone text is one prompt, and so are whole numbers in a row."""
    assert tokens(prompts) == expected


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ("", "prompt 0: it is empty; give at least one character"),
        (["a", ""], "prompt 0: 'a' is not a token id"),
        (["1", ""], "prompt 1: it is empty"),
        ([[1], []], "prompt 1: it has no token; give at least one"),
        (["1", 2], "prompt 1 is the number 2 among prompts; give token ids as a list, as in [2]"),
        ([1, "2"], "prompt 0 is the number 1 among prompts"),
        (5, "5 is of type int; give a text, a list of token ids, or a list of those"),
        (None, "None is of type NoneType; give a text"),
        (b"text", "b'text' is of type bytes"),
        ({"text": "1"}, "{'text': '1'} is of type dict; give a text"),
        ([b"text"], "prompt 0: b'text' is of type bytes; give a text or a list of token ids"),
        ([{"text": "1"}], "prompt 0: {'text': '1'} is of type dict"),
        ([None], "prompt 0: None is of type NoneType"),
        ([True, False], "prompt 0: True is of type bool"),
        ([[1, 2.5]], "prompt 0: 2.5 is not a token id; give whole numbers"),
        (torch.tensor([0.5]), "prompt 0: 0.5 is of type float"),
        ([[1, True]], "prompt 0: True is not a token id"),
        ([[[1, 2]]], "prompt 0: [1, 2] is not a token id"),
        ([[100]], "prompt 0: token id 100 is not in the vocabulary of 100; ids go from 0 to 99"),
        ([[-1]], "prompt 0: token id -1 is not in the vocabulary"),
        ("\ud800", "prompt 0: '\\ud800' has half of a surrogate pair, which is not a character"),
    ],
)
def test_refused(prompts, message):
    """PY-3: the error is one line with the prompt's place, its kind, and the accepted kinds."""
    with pytest.raises(ConfigError) as caught:
        READER.read_all(prompts, None)
    assert str(caught.value).startswith(message)


class TestParams:
    """Parameters are for all prompts or one for each."""

    def read(self, prompts, params) -> list[RequestParams]:
        return [one.params for one in READER.read_all(prompts, params)]

    def test_for_all_or_for_each(self):
        assert self.read(["1", "2"], None) == [DEFAULTS, DEFAULTS]
        assert self.read(["1", "2"], SAMPLED) == [SAMPLED, SAMPLED]
        assert self.read(["1", "2"], [GREEDY, SAMPLED]) == [GREEDY, SAMPLED]
        assert self.read([], []) == []

    @pytest.mark.parametrize(
        ("params", "message"),
        [
            ([GREEDY], "1 RequestParams for 2 prompts; give one for all, or one for each"),
            ({"temperature": 1}, "{'temperature': 1} is of type dict; give RequestParams(...), as in RequestParams("),
            ([GREEDY, 5], "5 is of type int; give RequestParams(...)"),
            ("greedy", "'greedy' is of type str; give RequestParams(...)"),
        ],
    )
    def test_refused(self, params, message):
        with pytest.raises(ConfigError) as caught:
            self.read(["1", "2"], params)
        assert str(caught.value).startswith(message)


class TestOne:
    """`generate_async` and `stream` take one."""

    @pytest.mark.parametrize("prompt", ["7 8", [7, 8], (7, 8), torch.tensor([7, 8]), numpy.array([7, 8]), range(7, 9)])
    def test_taken(self, prompt):
        read = READER.read_one(prompt, None)
        assert (read.prompt_tokens, read.params) == ((7, 8), DEFAULTS)

    @pytest.mark.parametrize("prompt", [["7 8"], [[7], [8]], [], ["1", "2"]])
    def test_several_are_refused(self, prompt):
        with pytest.raises(ConfigError, match="is not one prompt; give a text or token ids, several to generate"):
            READER.read_one(prompt, None)
