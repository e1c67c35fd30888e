"""Ids without a token: refused in prompts, empty in texts."""

from __future__ import annotations

import pytest

from megatron_ext.errors import ConfigError
from megatron_ext.text.vocabulary import Vocabulary


class Strict:
    """Tokenizer like SentencePiece that raises for unknown ids.

    Args:
        ids: Known ids.
        attributes: Attributes of the ids.
    """

    def __init__(self, ids: range | frozenset[int], **attributes: object) -> None:
        self._ids = ids
        vars(self).update(attributes)

    def detokenize(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        if not set(ids) <= set(self._ids):
            raise IndexError("piece id is out of range")
        return " ".join(str(token) for token in ids) + ("" if skip_special_tokens else "!")


GAPS = frozenset({0, 1, 2, 4, 7})
CASES = {
    "all": Vocabulary(Strict(range(10)), 10),
    "padded": Vocabulary(Strict(range(8), vocab_size=8), 10),
    "a range": Vocabulary(Strict(range(8), vocab_size=9, token_ids=range(8)), 10),
    "gaps": Vocabulary(Strict(GAPS, vocab_size=8, token_ids=GAPS), 10),
    "more than the model": Vocabulary(Strict(range(20), vocab_size=20), 10),
}
BAD = {"all": [], "padded": [8, 9], "a range": [8, 9], "gaps": [3, 5, 6, 8, 9], "more than the model": []}


@pytest.mark.parametrize("case", CASES)
def test_prompts(case):
    """SE-2: the words name the id and say where it should have been."""
    vocabulary = CASES[case]
    for token in range(10):
        if token in BAD[case]:
            with pytest.raises(ConfigError, match=rf"token id {token} has no token in the tokenizer, which ends at 7"):
                vocabulary.check_prompt((0, token, 1))
        else:
            vocabulary.check_prompt((0, token, 1))
    for token in (-1, 10, 2**40):
        with pytest.raises(ConfigError, match=rf"token id {token} is not in the vocabulary of 10; ids go from 0 to 9"):
            vocabulary.check_prompt((0, token))
    vocabulary.check_prompt(())


@pytest.mark.parametrize("case", CASES)
def test_texts(case):
    """A generated id without a token is empty text."""
    vocabulary = CASES[case]
    known = [token for token in range(10) if token not in BAD[case]]
    assert vocabulary.detokenize(list(range(12))) == " ".join(map(str, known))
    assert vocabulary.detokenize([0, 9, 1] if 9 in BAD[case] else [0, 1]) == "0 1"
    assert vocabulary.detokenize([1, 2], skip_special_tokens=False) == "1 2!"
    assert vocabulary.detokenize([]) == ""


@pytest.mark.parametrize("case", CASES)
def test_biases(case):
    """SA-2: biases are for any id of the model, whether it is text or not, and for no other."""
    CASES[case].check_biased((0, 9))
    CASES[case].check_biased(())
    with pytest.raises(ConfigError, match=r"token id 10 is not in the vocabulary of 10; ids go from 0 to 9"):
        CASES[case].check_biased((0, 10))
