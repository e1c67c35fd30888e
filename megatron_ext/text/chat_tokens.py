"""Tokenization of conversations: special tokens spelled in a message stay text.

A chat template writes special tokens around contents, and then the whole text is tokenized: a content that spells one
of them would end its turn. Therefore each spelling in a content is replaced by a *stand-in* before the template is
rendered: one character of Unicode's private use area that does not occur in the conversation. Any special token spelled
in the rendered text is then from the template or the assistant.

A conversation that spells none is rendered and tokenized as usual. Otherwise the text with stand-ins is tokenized by a
copy of the tokenizer whose special tokens have secret random names. Special tokens spelled in the rendered text are
replaced by these names; stand-ins are replaced by their texts, which match no token any more. Normalizers, the spaces
that tokens absorb, and the tokens added around a text stay as in the original, so the copy gives the ids of the
original for a text without stand-ins.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ext.errors import ConfigError
from megatron_ext.files import read_json
from megatron_ext.text.rust_panics import CANNOT_ENCODE, panics_as_errors
from megatron_ext.text.tokenizer_files import TOKENIZER_CONFIG, read_special_tokens

if TYPE_CHECKING:  # slow to import
    from tokenizers.normalizers import Normalizer
    from transformers import PreTrainedTokenizerBase


ASSISTANT = "assistant"
_STAND_INS = range(0xE000, 0xF900)  # the private use area
_UNTOUCHED_FIELDS = ("role",)  # templates compare it with constants


@dataclass(frozen=True)
class AddedToken:
    """Token that is found in texts by its spelling, before the tokenizer's model runs."""

    text: str
    token_id: int
    is_special: bool
    is_normalized: bool = False  # found in the normalized text
    is_single_word: bool = False  # found only between non-word characters


class ControlTokens:
    """Finder of special tokens in texts.

    Args:
        added: All added tokens: a longer one that is not special hides a special one.
        normalize: The tokenizer's normalizer; None if it has none, or no special token is searched after it.
    """

    def __init__(self, added: Iterable[AddedToken], normalize: Callable[[str], str] | None = None) -> None:
        tokens = sorted((token for token in added if token.text), key=lambda token: -len(token.text))
        self.special = {token.text: token.token_id for token in tokens if token.is_special}
        self._pattern = re.compile("|".join(map(_spelling, tokens)) or r"(?!)")
        ends = [(text[:i], text[i:]) for text in self.special for i in range(1, len(text))]
        self._beginnings = {beginning for beginning, _ in ends}
        self._rests = {rest for _, rest in ends}
        self._longest = max(map(len, self.special), default=0)
        self._normalize = normalize or str
        normalized_tokens = [token.text for token in tokens if token.is_special and token.is_normalized]
        self._normalized = {normalize(text).strip() for text in normalized_tokens} - {""} if normalize else set()

    def protect(self, messages: Sequence[Mapping[str, object]]) -> tuple[list[dict[str, object]], dict[int, str]]:
        """Return the messages with stand-ins in all texts except the assistant's, and the text of each stand-in.

        Beside whole spellings, a first part at the end of a text and a last part at its start are replaced, since the
        template's own text could complete them.

        Raises:
            ConfigError: A role spells a special token, or the conversation uses all private use characters.
        """
        for message in messages:
            role = str(message["role"])
            if not role.isidentifier() and self.count(role):
                raise ConfigError(f"the role {role!r} spells a special token; roles are words such as 'user'")
        stand_ins = _StandIns(messages)
        protected = [
            dict(message)
            if message["role"] == ASSISTANT
            else {
                name: value if name in _UNTOUCHED_FIELDS else self._protect(value, stand_ins)
                for name, value in message.items()
            }
            for message in messages
        ]
        return protected, stand_ins.texts

    def count(self, text: str) -> int:
        """Return the number of special tokens that a text spells, before and after normalization."""
        found = sum(match.group() in self.special for match in self._pattern.finditer(text))
        if not self._normalized:
            return found
        normalized = self._normalize(text)
        return found + sum(normalized.count(token) for token in self._normalized)

    def rename(self, text: str, names: Mapping[str, str]) -> str:
        """Return the text with special tokens under other names."""
        return self._pattern.sub(lambda match: names.get(match.group(), match.group()), text)

    def _protect(self, value: Any, stand_ins: _StandIns) -> Any:
        if isinstance(value, str):
            return self._protect_text(value, stand_ins)
        if isinstance(value, Mapping):
            return {self._protect(name, stand_ins): self._protect(item, stand_ins) for name, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._protect(item, stand_ins) for item in value]
        return value

    def _protect_text(self, text: str, stand_ins: _StandIns) -> str:
        def replace(match: re.Match[str]) -> str:
            spelled = match.group()
            return stand_ins.of(spelled) if spelled in self.special else spelled

        protected = self._protect_ends(self._pattern.sub(replace, text), stand_ins)
        if self._normalized and self._is_spelled_differently(protected):
            inner = protected.strip()
            return protected.replace(inner, stand_ins.of(inner.translate(stand_ins.texts)), 1)
        return protected

    def _protect_ends(self, text: str, stand_ins: _StandIns) -> str:
        """Replace partial spellings at both ends of a text, inside of surrounding spaces, which templates strip."""
        body = text.strip()
        rest = next((body[:n] for n in self._lengths(body) if body[:n] in self._rests), "")
        beginning = next((body[-n:] for n in self._lengths(body) if body[-n:] in self._beginnings), "")
        if len(rest) + len(beginning) > len(body):
            beginning = ""
        if not rest and not beginning:
            return text
        inner = body[len(rest) : len(body) - len(beginning)]
        start = text.index(body)
        around = text[:start], text[start + len(body) :]
        return around[0] + stand_ins.of(rest) + inner + stand_ins.of(beginning) + around[1]

    def _lengths(self, text: str) -> range:
        return range(min(len(text), self._longest), 0, -1)

    def _is_spelled_differently(self, text: str) -> bool:
        """Return whether normalization makes a special token of the text."""
        normalized = self._normalize(text)
        return any(token in normalized for token in self._normalized)


def _spelling(token: AddedToken) -> str:
    pattern = re.escape(token.text)
    return rf"(?<!\w){pattern}(?!\w)" if token.is_single_word else pattern


class _StandIns:
    """Stand-ins: characters that do not occur in a conversation."""

    def __init__(self, messages: Sequence[Mapping[str, object]]) -> None:
        self._messages = messages
        self._free: list[int] | None = None
        self._of: dict[str, str] = {}

    @property
    def texts(self) -> dict[int, str]:
        """Texts of the stand-ins, in the form of `str.translate`."""
        return {ord(character): text for text, character in self._of.items()}

    def of(self, text: str) -> str:
        """Return the stand-in of a text; an empty text needs none."""
        if text and text not in self._of:
            if self._free is None:
                used = set(json.dumps(self._messages, ensure_ascii=False, default=str))
                self._free = [code for code in reversed(_STAND_INS) if chr(code) not in used]
            if not self._free:
                raise ConfigError("the conversation uses all private-use characters; leave some out")
            self._of[text] = chr(self._free.pop())
        return self._of.get(text, "")


Messages = Sequence[Mapping[str, object]]


def marked_special(directory: Path) -> set[str]:
    """Return the texts of tokens that the files of a tokenizer mark as special or give a role."""
    config = directory / TOKENIZER_CONFIG
    added = read_json(config).get("added_tokens_decoder") if os.path.lexists(config) else None
    entries = added.values() if isinstance(added, dict) else ()
    marked = {entry.get("content") for entry in entries if isinstance(entry, dict) and entry.get("special") is True}
    return {text for text in marked if isinstance(text, str)} | set(read_special_tokens(directory).values())


@dataclass(frozen=True)
class RenderedChat:
    """Rendered conversation.

    Attributes:
        text: Text that the model reads.
        ids: Computes the token ids, which takes longer.
        ids_from: Computes the token ids of the text from a position on, without tokens that begin a text.
    """

    text: str
    ids: Callable[[], list[int]]
    ids_from: Callable[[int], list[int]]


def _normal_form(normalizer: Normalizer, text: str) -> str:
    with panics_as_errors(CANNOT_ENCODE):
        return normalizer.normalize_str(text)


def _whole(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:  # lone surrogate, valid in JSON
        raise ConfigError("a message has half of a surrogate pair, which is not a character") from None
    return text


class ChatTokens:
    """Tokenizer of conversations.

    Args:
        tokenizer: Tokenizer of `tokenizers` or of transformers, as loaded.
        special: Special tokens, as texts and ids, in addition to tokens that the tokenizer marks as special.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, special: Collection[str | int | None]) -> None:
        import tokenizers

        self._is_fast = isinstance(tokenizer, tokenizers.Tokenizer)
        if not self._is_fast and tokenizer.is_fast:
            self._is_fast, tokenizer = True, tokenizer.backend_tokenizer
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder() if self._is_fast else tokenizer.added_tokens_decoder
        normalizer = tokenizer.normalizer if self._is_fast else None
        tokens = [
            AddedToken(
                text=one.content,
                token_id=token_id,
                is_special=one.special or one.content in special or token_id in special,
                is_normalized=one.normalized,
                is_single_word=one.single_word,
            )
            for token_id, one in added.items()
        ]
        self._control = ControlTokens(tokens, None if normalizer is None else partial(_normal_form, normalizer))
        self._renamed: RenamedTokenizer | None = None  # created on first use, from the tokenizer as loaded

    def render(
        self,
        messages: Messages,
        render: Callable[[Messages], str],
        tokenize: Callable[[str], list[int]],
        tokenize_plain: Callable[[str], list[int]],
        *,
        parse_control: bool,
    ) -> RenderedChat:
        """Render a conversation, with a function that computes its ids.

        Args:
            messages: Messages with a role.
            render: Renders messages with the chat template.
            tokenize: Tokenizes a whole text.
            tokenize_plain: Tokenizes a part of a text.
            parse_control: Whether special tokens spelled in any content become these tokens.

        Raises:
            ConfigError: The text has a lone surrogate; and errors of `render` and `ControlTokens.protect`.
        """
        plain = _whole(render(messages))
        whole = RenderedChat(plain, partial(tokenize, plain), lambda start: tokenize_plain(plain[start:]))
        protected, stand_ins = ([], {}) if parse_control else self._control.protect(messages)
        if not stand_ins:
            return whole
        marked = render(protected)
        count = self._control.count
        if marked.translate(stand_ins) == plain and count(marked) == count(plain):  # no content spells a special token
            return whole

        def ids_from(start: int) -> list[int]:
            return self._encode(marked[_marked_position(marked, stand_ins, start) :], stand_ins, is_whole=False)

        return RenderedChat(plain, partial(self._encode, marked, stand_ins), ids_from)

    def _encode(self, marked: str, stand_ins: Mapping[int, str], *, is_whole: bool = True) -> list[int]:
        if not self._is_fast:
            raise _ambiguous_token("it is written in Python")
        if self._renamed is None:
            self._renamed = RenamedTokenizer(self._tokenizer.to_str(), self._control)
        return self._renamed.encode(marked, stand_ins, is_whole=is_whole)


def _marked_position(marked: str, stand_ins: Mapping[int, str], position: int) -> int:
    """Return the position in a text with stand-ins of a position in the text without them.

    A position inside the text of a stand-in is the end of the stand-in.
    """
    for found in re.finditer(f"[{''.join(map(chr, stand_ins))}]", marked):
        if found.start() >= position:
            break
        position -= len(stand_ins[ord(found[0])]) - 1
        position = max(position, found.end())
    return position


class RenamedTokenizer:
    """Copy of a tokenizer whose special tokens have secret random names.

    Args:
        serialized: Contents of a `tokenizer.json`.
        control: Special tokens of the tokenizer.

    Raises:
        ConfigError: The tokenizer cannot be rebuilt with the names.
    """

    def __init__(self, serialized: str, control: ControlTokens) -> None:
        import tokenizers

        nonce = secrets.token_hex(8)
        self._control = control
        self._names = {text: f"<|{nonce}-{token_id}|>" for text, token_id in control.special.items()}
        with panics_as_errors("the tokenizer cannot be read"):
            try:
                self._tokenizer = tokenizers.Tokenizer.from_str(renamed(serialized, self._names))
            except Exception as error:  # `tokenizers` raises bare Exception
                raise _ambiguous_token(str(error)) from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        for text, token_id in control.special.items():
            if self._tokenizer.token_to_id(self._names[text]) != token_id:
                raise _ambiguous_token(f"{text!r} has a different id under another name")

    def encode(self, marked: str, stand_ins: Mapping[int, str], *, is_whole: bool = True) -> list[int]:
        """Return the ids of a rendered text: special tokens for spelled ones, text for stand-ins.

        Args:
            marked: Text with stand-ins.
            stand_ins: Texts of the stand-ins.
            is_whole: Whether tokens that begin a text are added.
        """
        text = self._control.rename(marked, self._names).translate(stand_ins)
        with panics_as_errors(CANNOT_ENCODE):
            # `encode` keeps Python's lock
            (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=is_whole)
        return encoding.ids


def _ambiguous_token(why: str) -> ConfigError:
    return ConfigError(
        f"this tokenizer cannot tell control tokens from text, so the messages must not spell any: {why}"
    )


def renamed(serialized: str, names: Mapping[str, str]) -> str:
    """Return a `tokenizer.json` in which tokens have other names and the same ids."""
    content = json.loads(serialized)
    for token in content["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    model = content["model"]
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        model["vocab"] = {names.get(piece, piece): token_id for piece, token_id in vocabulary.items()}
    else:  # pieces with their scores
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocabulary]
    if model.get("unk_token") is not None:
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    if "merges" in model:  # drop merges that produce or extend a special token
        model["merges"] = [merge for merge in model["merges"] if not names.keys() & _pieces(merge)]
    return json.dumps(content, ensure_ascii=False)


def _pieces(merge: str | Sequence[str]) -> set[str]:
    """Return both parts of a merge and its result; older files store the parts in one text with a space between."""
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return {left, right, left + right}
