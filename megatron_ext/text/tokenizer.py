"""Tokenizers: text to token ids and back; prompts with at most one beginning of document.

A `tokenizer.json` is read by `tokenizers`, older formats by `transformers`.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from megatron_ext.errors import ConfigError
from megatron_ext.files import read_text
from megatron_ext.text.chat_template import ChatOptions, render_chat
from megatron_ext.text.chat_tokens import ChatTokens, Messages, RenderedChat, marked_special
from megatron_ext.text.rust_panics import CANNOT_DECODE, CANNOT_ENCODE, panics_as_errors
from megatron_ext.text.template_rendering import RENDERER
from megatron_ext.text.tokenizer_files import (
    LONGEST_FILE,
    TOKENIZER_FILE,
    ChatTemplates,
    check_files,
    has_tokenizer,
    no_tokenizer,
    read_chat_templates,
    read_special_tokens,
    read_template_file,
    special_ids,
)

if TYPE_CHECKING:  # slow to import
    import tokenizers


class _Backend:
    """Loaded tokenizer of a library.

    Args:
        wrapped: Object of the library.
        vocabulary: Ids by token, added tokens included.
    """

    def __init__(self, wrapped: Any, vocabulary: Mapping[str, int]) -> None:
        self.wrapped = wrapped
        known = frozenset(vocabulary.values())
        self.vocab_size = 1 + max(known, default=-1)
        self.token_ids = range(self.vocab_size) if len(known) == self.vocab_size else known
        self.longest_token = max(map(len, vocabulary), default=0)


class FastBackend(_Backend):
    """Backend of a tokenizer of `tokenizers`."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        # Saved truncation and padding are for training batches: a prompt is neither truncated nor padded.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        super().__init__(tokenizer, tokenizer.get_vocab(with_added_tokens=True))

    @classmethod
    def read(cls, file: Path) -> FastBackend:
        """Read a `tokenizer.json`.

        Raises:
            ConfigError: The file is not a tokenizer.
        """
        import tokenizers

        text = read_text(file, LONGEST_FILE)
        with panics_as_errors(f"{file} cannot be read"):
            try:
                tokenizer = tokenizers.Tokenizer.from_str(text)
            except Exception as error:  # `tokenizers` raises bare Exception
                raise ConfigError(f"{file} is not a tokenizer: {error}") from error
        return cls(tokenizer)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text, with or without the special tokens that the tokenizer adds."""
        # `encode` holds Python's lock: 8 MB of text stopped all threads for 7 to 20 s.
        with panics_as_errors(CANNOT_ENCODE):
            (encoding,) = self.wrapped.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding.ids

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        """Return the text of ids."""
        with panics_as_errors(CANNOT_DECODE):
            return self.wrapped.decode(ids, skip_special_tokens=skip_special_tokens)

    @property
    def serialized(self) -> str:
        """Contents of a `tokenizer.json`."""
        return self.wrapped.to_str()

    def id_of(self, token: str) -> int | None:
        """Return the id of a token's text."""
        return self.wrapped.token_to_id(token)

    def piece_of(self, token: int) -> str | None:
        """Return a token as the vocabulary spells it."""
        return self.wrapped.id_to_token(token)


class AutoBackend(_Backend):
    """Backend of a directory in an older format."""

    def __init__(self, directory: Path) -> None:
        if not has_tokenizer(directory):
            raise ConfigError(no_tokenizer(directory))
        brings_code = check_files(directory)
        from transformers import AutoTokenizer

        with panics_as_errors(f"{directory}: the tokenizer cannot be read"):
            try:
                tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
            except Exception as error:  # transformers may raise anything for untrusted files
                reason = (
                    "it has custom code (auto_map), which is never run"
                    if brings_code
                    else str(error).strip().split("\n", 1)[0]
                )
                raise ConfigError(f"{directory}: the tokenizer cannot be read: {reason}") from error
        super().__init__(tokenizer, tokenizer.get_vocab())

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text, with or without the special tokens that the tokenizer adds."""
        with panics_as_errors(CANNOT_ENCODE):
            return self.wrapped.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        """Return the text of ids."""
        with panics_as_errors(CANNOT_DECODE):
            return self.wrapped.decode(ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)

    @property
    def serialized(self) -> str | None:
        """Contents of a `tokenizer.json`; None for a tokenizer written in Python."""
        return self.wrapped.backend_tokenizer.to_str() if self.wrapped.is_fast else None

    def id_of(self, token: str) -> int | None:
        """Return the id of a token's text."""
        return self.wrapped.get_vocab().get(token)

    def piece_of(self, token: int) -> str | None:
        """Return a token as the vocabulary spells it."""
        return self.wrapped.convert_ids_to_tokens(token)


_BESIDE = "beside"  # role under which tools and variables are searched for special tokens


class Tokenizer(Protocol):
    """Tokenizer interface of engine, controller and tools, with megatron-core's names."""

    eod: int | None  # ends a document, None if the tokenizer has no such token
    bos: int | None  # begins a document
    vocab_size: int  # ids are below it

    @property
    def token_ids(self) -> range | frozenset[int]:
        """Ids that have a token; a file may leave gaps."""

    def tokenize(self, text: str) -> list[int]:
        """Return the ids of a text, with the special tokens that the tokenizer itself adds."""

    def detokenize(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """Return the text of ids."""


def ends_of(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return all tokens that end a document, of any tokenizer; `eod` is the first one."""
    ends: tuple[int, ...] = getattr(tokenizer, "ends", ())
    return ends or (() if tokenizer.eod is None else (tokenizer.eod,))


class NullTokenizer:
    """Tokenizer of ids separated by spaces, without an end of document.

    Args:
        vocab_size: Exclusive upper bound of ids.
        problem: Error of each text, where a model's folder has no tokenizer: which files are missing, and what to do.
            Prompts are token ids then. Empty if texts with ids are read.
    """

    eod: int | None = None
    bos: int | None = None

    def __init__(self, vocab_size: int, problem: str = "") -> None:
        if vocab_size <= 0:
            raise ConfigError(f"vocabulary size {vocab_size} must be positive")
        self.problem = problem
        self.vocab_size, self.token_ids = vocab_size, range(vocab_size)

    def tokenize(self, text: str) -> list[int]:
        """Return the ids of a text such as "17 4 4".

        Raises:
            ConfigError: A word is not an id of the vocabulary, or no text is read.
        """
        if self.problem:
            raise ConfigError(self.problem)
        for word in text.split():
            if not (word.isascii() and word.isdigit() and int(word) < self.vocab_size):
                raise ConfigError(
                    f"{word!r} is not a token id; the NullTokenizer accepts ids from 0 to {self.vocab_size - 1} "
                    "separated by spaces"
                )
        return [int(word) for word in text.split()]

    def detokenize(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """Return ids as text; no id is special."""
        return " ".join(str(token_id) for token_id in ids)


class TextTokenizer:
    """Hugging Face tokenizer: `tokenizer.json` through `tokenizers`, other formats through `transformers`.

    Args:
        path: Directory, or a `tokenizer.json` with the files of its special tokens next to it.
        template_file: File of a chat template in place of the directory's; None for these.

    Attributes:
        longest_token: Maximum number of characters of one token, so that n characters are at least n / `longest_token`
            tokens. Characters that the tokenizer drops, such as repeated spaces, are not counted.

    Raises:
        ConfigError: The path does not exist, or has no tokenizer; or the file is no template.
    """

    _chat_tokens: ChatTokens | None = None  # created with the first conversation

    def __init__(self, path: str | Path, template_file: str | Path | None = None) -> None:
        self.path = path = Path(path)
        if not path.exists():
            raise ConfigError(f"tokenizer {path} does not exist; give a directory or a {TOKENIZER_FILE}")
        self._directory = directory = path if path.is_dir() else path.parent
        self._marked_special = marked_special(directory)
        file = path / TOKENIZER_FILE if path.is_dir() else path
        self._backend = FastBackend.read(file) if os.path.lexists(file) else AutoBackend(path)
        self.vocab_size, self.token_ids = self._backend.vocab_size, self._backend.token_ids
        self.longest_token = self._backend.longest_token
        self.bos, self.ends = special_ids(directory, self._backend.id_of)
        self.eod = next(iter(self.ends), None)
        for label, token_id in (("beginning", self.bos), *(("end", token) for token in self.ends)):
            if token_id is not None and not 0 <= token_id < self.vocab_size:
                raise ConfigError(
                    f"{directory}: the {label} of a document is token {token_id}, "
                    f"outside the tokenizer's {self.vocab_size} ids"
                )
        # Read now: the directory may later hold another tokenizer.
        self._special_tokens = read_special_tokens(directory)
        if template_file is not None:
            self._templates: ChatTemplates | ConfigError = read_template_file(Path(template_file))
        else:
            try:
                self._templates = read_chat_templates(directory)
            except ConfigError as error:  # which matters only for chats
                self._templates = error

    def tokenize(self, text: str) -> list[int]:
        """Return the ids of a text, with the special tokens that the tokenizer itself adds."""
        return self._backend.encode(text)

    def tokenize_plain(self, text: str) -> list[int]:
        """Return the ids of a text without added special tokens; special tokens spelled in it become tokens."""
        return self._backend.encode(text, add_special_tokens=False)

    def detokenize(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """Return the text of ids, without special tokens unless requested."""
        return self._backend.decode(ids, skip_special_tokens)

    def piece_of(self, token: int) -> str | None:
        """Return a token as the vocabulary spells it."""
        return self._backend.piece_of(token)

    @property
    def serialized(self) -> str | None:
        """Contents of a `tokenizer.json`; None if the tokenizer has no such form."""
        return self._backend.serialized

    @property
    def chat_templates(self) -> ChatTemplates:
        """Jinja templates of the tokenizer; none if the model is not a chat model.

        Raises:
            ConfigError: See `read_chat_templates`.
        """
        if isinstance(self._templates, ConfigError):
            raise self._templates
        return self._templates

    @property
    def chat_template(self) -> str | None:
        """Template of conversations without tools; None if the model is not a chat model.

        Raises:
            ConfigError: See `read_chat_templates` and `ChatTemplates.chosen`.
        """
        return self.chat_templates.chosen(has_tools=False)

    def prepare_chat(self) -> None:
        """Start the process that renders conversations if there is a template, without waiting for it."""
        if isinstance(self._templates, ChatTemplates) and self._templates.named:
            RENDERER.start()

    def apply_chat_template(
        self, messages: Messages, add_generation_prompt: bool = True, *, options: ChatOptions | None = None
    ) -> str:
        """Return a conversation as a prompt.

        Most templates write the beginning of document, which `tokenize` may then add again. The engine ensures that a
        prompt begins with a single one (`InferenceController.tokenize_prompt`).

        Args:
            messages: Messages as in [{"role": "user", "content": "Hello"}].
            add_generation_prompt: Whether to end with the beginning of the model's answer.
            options: All template options; replaces `add_generation_prompt`.

        Raises:
            ConfigError: There is no template, or messages are invalid or refused by it.
        """
        chosen = options or ChatOptions(add_generation_prompt)
        template = self.chat_templates.chosen(has_tools=bool(chosen.tools))
        if template is None:
            raise ConfigError(f"{self._directory} has no chat template; give the prompt as text, or --chat-template")
        return render_chat(template, messages, self._special_tokens, chosen)

    def render_chat(
        self, messages: Messages, *, parse_control: bool = False, options: ChatOptions | None = None
    ) -> RenderedChat:
        """Return a conversation as rendered text, in which spelled special tokens can be told from real ones.

        Args:
            messages: As for `apply_chat_template`.
            parse_control: Whether special tokens spelled in any content become these tokens. Otherwise only those in
                the assistant's contents do; those in other contents, tools and variables stay text; see `chat_tokens`.
            options: All template options.

        Raises:
            ConfigError: As `apply_chat_template`; or a role spells a special token.
        """
        chosen = options or ChatOptions()

        def render(chat: Messages) -> str:
            *contents, last = chat
            fields: Any = {name: last[name] for name in ("tools", "variables")}
            protected = chosen if last is beside else dataclasses.replace(chosen, **fields)
            return self.apply_chat_template(contents, options=protected)

        # As one more message, so that special tokens spelled in tools and variables are protected, too.
        beside: dict[str, Any] = {"role": _BESIDE, "tools": chosen.tools, "variables": chosen.variables}
        if self._chat_tokens is None:
            special = {*self._marked_special, *self.ends, self.eod, self.bos}
            self._chat_tokens = ChatTokens(self._backend.wrapped, special)
        together = [*messages, beside] if isinstance(messages, list | tuple) else [beside]
        return self._chat_tokens.render(
            together, render, self.tokenize, self.tokenize_plain, parse_control=parse_control
        )


def tokenize_prompt(tokenizer: Tokenizer, text: str, *, add_bos: bool = False) -> list[int]:
    """Return the ids of a text as its tokenizer gives them, with at most one beginning of document.

    Args:
        tokenizer: Tokenizer of the model.
        text: Prompt.
        add_bos: Whether to add the beginning of document if the tokenizer does not.

    Raises:
        ConfigError: `add_bos` is set but the tokenizer has no such token, or it cannot read the text.
    """
    if add_bos and tokenizer.bos is None:
        raise ConfigError("add_BOS is set, but the tokenizer has no beginning-of-document token; leave it out")
    return begin_once(tokenizer.tokenize(text), tokenizer.bos, add_bos=add_bos)


def begin_once(tokens: Sequence[int], bos: int | None, *, add_bos: bool = False) -> list[int]:
    """Return the tokens with exactly one beginning of document, if they have any or it is to be added.

    A text that spells it, as chat templates do, may get a second one from the tokenizer.

    Args:
        tokens: Tokens of a prompt.
        bos: Token that begins a document; None if there is no such token.
        add_bos: Whether to add it in any case; `bos` is not None then.
    """
    spelled = next((i for i, token in enumerate(tokens) if token != bos), len(tokens))
    beginning = [] if bos is None or not (add_bos or spelled) else [bos]
    return [*beginning, *tokens[spelled:]]


def word_tokens(tokenizer: Tokenizer, word: str) -> list[tuple[int, ...]]:
    """Return the tokenizations of a word: as it stands, and after a space if that changes its first token.

    Other ways to split the word are not excluded. vLLM's `bad_words` behave alike, except for words whose number of
    tokens changes after a space.

    Args:
        tokenizer: Tokenizer of the model.
        word: Non-empty word.

    Raises:
        ConfigError: The tokenizer makes no token of the word, or cannot read it.
    """
    plain = _plain_tokens(tokenizer, word)
    if not plain:
        raise ConfigError(f"bad_words: the tokenizer returns no token for {word!r}; leave it out")
    if not isinstance(tokenizer, TextTokenizer) or word[0].isspace():
        return [plain]
    after_space = _plain_tokens(tokenizer, " " + word)
    return [plain, after_space] if after_space[0] != plain[0] else [plain]


def _plain_tokens(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """Return the ids of a text without tokens added around it."""
    if isinstance(tokenizer, TextTokenizer):
        return tuple(tokenizer.tokenize_plain(text))
    return tuple(tokenizer.tokenize(text))
