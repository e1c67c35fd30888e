"""Response builders of the two routes: OpenAI's objects, whole and in parts."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from megatron_ext.engine.updates import Progress
from megatron_ext.scheduling.record import RequestRecord
from megatron_ext.server.openai.answers import PLAIN, AnswerFormat, CallPart
from megatron_ext.server.openai.responses import Piece, ResponseBuilder, Scored, generated_scores, prompt_scores
from megatron_ext.server.openai.scored_content import AnswerPiece, ScoredReader, finite, scored_parts
from megatron_ext.text.vocabulary import Vocabulary

CALLED = "tool_calls"  # finish reason of an answer with tool calls


class CompletionResponseBuilder(ResponseBuilder):
    """Response builder of `/v1/completions`.

    Args:
        model: Name that the model is served under.
        vocabulary: Vocabulary that decodes single tokens.
        choices: Choices of each prompt.
        has_scores: Whether log-probs were requested.
        echoes: Prompt text of each choice, if it precedes the output.
        shows_ids: Whether token ids are returned as well.
    """

    def __init__(
        self,
        model: str,
        vocabulary: Vocabulary,
        choices: int,
        *,
        has_scores: bool,
        echoes: Sequence[str] | None,
        shows_ids: bool = False,
    ) -> None:
        super().__init__("cmpl", model, vocabulary, PLAIN, choices, has_scores=has_scores, shows_ids=shows_ids)
        self._echoes = echoes
        self._lengths: dict[int, int] = {}  # characters of the text so far, by choice

    def envelope(self, *, is_part: bool) -> dict[str, object]:
        """Return the fields around the choices."""
        return {"object": "text_completion", **self._fields}

    def heading(self, source: Progress | RequestRecord) -> dict[str, object]:
        """Return no fields: prompts are returned with their choices."""
        return {}

    def opening(self, index: int, first: Progress | RequestRecord) -> dict[str, object] | None:
        """Return the prompt, if echoed, and its ids, if requested."""
        if self._echoes is None and not self._shows_ids:
            return None
        echo = "" if self._echoes is None else self._echoes[index]
        return self._choice(index, [Piece(echo, scores=self._prompt_scores(first))]) | self._prompt_ids(first)

    def part(self, index: int, piece: Piece) -> dict[str, object] | None:
        """Return a part of a choice."""
        return self._choice(index, [piece])

    def choice(self, index: int, record: RequestRecord, first: RequestRecord) -> dict[str, object]:
        """Return a choice of a response without stream; `first` is the record of the prompt's first choice."""
        echo = "" if self._echoes is None else self._echoes[index]
        prompt = Piece(echo, scores=self._prompt_scores(first))
        scores = generated_scores(record, 0)
        answer = Piece(record.generated_text, record.generated_tokens, scores, record.finish_reason)
        return self._choice(index, [prompt, answer]) | self._prompt_ids(record)

    def _choice(self, index: int, pieces: Sequence[Piece]) -> dict[str, object]:
        """Return a choice, or a part of it, whose text is the one of `pieces`."""
        text, last = "".join(piece.text for piece in pieces), pieces[-1]
        log_probs = self._log_probs(index, pieces) if self.has_scores else None
        fields = {"index": index, "text": text, "logprobs": log_probs, "finish_reason": last.reason}
        return fields | self._ids(last.tokens)

    def _prompt_scores(self, first: Progress | RequestRecord) -> list[Scored]:
        return prompt_scores(first) if self.has_scores and self._echoes is not None else []

    def _log_probs(self, index: int, pieces: Sequence[Piece]) -> dict[str, object]:
        """Return the log-probs of all tokens, even of tokens that the text does not show: clients count them."""
        offsets: list[int] = []
        length = self._lengths.get(index, 0)
        for piece in pieces:
            for one in scored_parts(self._vocabulary, piece.scores, piece.text):
                begun = sum(byte & 0xC0 != 0x80 for byte in one.data)  # characters
                offsets.append(length - (bool(one.data) and one.data[0] & 0xC0 == 0x80))
                length += begun
            self._lengths[index] = length = self._lengths.get(index, 0) + len(piece.text)
        scores = [score for piece in pieces for score in piece.scores]
        return {
            "tokens": [self._vocabulary.token_text(one.token) for one in scores],
            "token_logprobs": [finite(one.log_prob) for one in scores],
            "top_logprobs": [self._best(one) for one in scores],
            "text_offset": offsets,
        }

    def _best(self, one: Scored) -> dict[str, float | None] | None:
        """Return the best tokens and, always, the chosen one. Tokens with equal text count as the best of them."""
        if one.log_prob is None:
            return None
        log_probs: dict[int, float] = one.best | {one.token: one.log_prob}
        ranked = sorted(log_probs.items(), key=lambda item: item[1])
        return {self._vocabulary.token_text(token): finite(log_prob) for token, log_prob in ranked}


class ChatResponseBuilder(ResponseBuilder):
    """Response builder of `/v1/chat/completions`.

    Args:
        model: Name that the model is served under.
        vocabulary: Vocabulary that decodes single tokens.
        choices: Choices of the conversation.
        has_scores: Whether log-probs were requested.
        shows_ids: Whether token ids are returned as well.
        answer_format: Format of the answers' thinking and tool calls.
    """

    def __init__(
        self,
        model: str,
        vocabulary: Vocabulary,
        choices: int,
        *,
        has_scores: bool,
        shows_ids: bool = False,
        answer_format: AnswerFormat = PLAIN,
    ) -> None:
        super().__init__(
            "chatcmpl", model, vocabulary, answer_format, choices, has_scores=has_scores, shows_ids=shows_ids
        )
        self._readers = [ScoredReader(answer_format, vocabulary) for _ in range(choices)]

    def envelope(self, *, is_part: bool) -> dict[str, object]:
        """Return the fields around the choices."""
        return {"object": "chat.completion.chunk" if is_part else "chat.completion", **self._fields}

    def heading(self, source: Progress | RequestRecord) -> dict[str, object]:
        """Return the conversation's ids, if requested."""
        return self._prompt_ids(source)

    def opening(self, index: int, first: Progress | RequestRecord) -> dict[str, object] | None:
        """Return the first part of a choice, with the role."""
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def part(self, index: int, piece: Piece) -> dict[str, object] | None:
        """Return a part of a choice; pieces of calls are returned as soon as they are certain."""
        part, reason = self._read(index, piece)
        thinking, content, log_probs = part.thinking, part.content, self._log_probs(part)
        delta: dict[str, object] = _thinking(thinking) if thinking else {}
        if content:
            delta["content"] = content
        if calls := part.calls:
            delta["tool_calls"] = [_call_part(call) for call in calls]
        has_scores = log_probs is not None and bool(log_probs["content"])
        if not delta and reason is None and not has_scores and not self._shows_ids and not self.shows_versions:
            return None
        return {"index": index, "delta": delta, "logprobs": log_probs, "finish_reason": reason} | self._ids(
            piece.tokens
        )

    def choice(self, index: int, record: RequestRecord, first: RequestRecord) -> dict[str, object]:
        """Return a choice of a response without stream; `first` is the record of the prompt's first choice."""
        scores = generated_scores(record, 0)
        piece = Piece(record.generated_text, record.generated_tokens, scores, record.finish_reason or "")
        part, reason = self._read(index, piece)
        calls = part.calls
        text = part.content or (None if calls else "")
        message: dict[str, object] = {"role": "assistant", "content": text, "refusal": None}
        if self._readers[index].has_thought:
            message |= _thinking(part.thinking)
        if calls:
            message["tool_calls"] = [_whole_call(call) for call in calls]
        log_probs = self._log_probs(part)
        both = {}
        # Under Megatron's names; in a message, which a client may send back, if they read as the message.
        if self._shows_ids:
            both = {**self._prompt_ids(first), "generation_token_ids": list(piece.tokens)}
        return (
            {
                "index": index,
                "message": message | (both if record.stop_word is None else {}),
                "logprobs": log_probs,
                "finish_reason": reason or None,
            }
            | both
            | self._ids(piece.tokens)
        )

    def _read(self, index: int, piece: Piece) -> tuple[AnswerPiece, str | None]:
        """Return what a piece has made certain, and the finish reason: None until the choice has ended."""
        reader = self._readers[index]
        found = reader.read(piece)
        has_called = reader.call_count and piece.reason == "stop"
        return found, CALLED if has_called else piece.reason

    def _log_probs(self, found: AnswerPiece) -> dict[str, object] | None:
        """Return the log-probs of the content's tokens; of all tokens where their ids are shown, too."""
        if not self.has_scores:
            return None
        scores = found.scores if self._shows_ids else found.content_scores
        return {"content": [one.to_dict(self._vocabulary) for one in scores], "refusal": None}


def _thinking(text: str) -> dict[str, object]:
    """Return the fields of thinking under the names of vLLM and DeepSeek."""
    return {"reasoning": text, "reasoning_content": text}


def _whole_call(call: CallPart) -> dict[str, object]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


def _call_part(call: CallPart) -> dict[str, object]:
    """Return a part of a call: the first one has its id and name."""
    if call.name is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    return {"index": call.index, **_whole_call(call)}
