"""Small vocabularies of Megatron-LM's kinds of tokenizers, written by the tests."""

from __future__ import annotations

import base64
import json
from pathlib import Path

MERGES = ("in", "th", "the", " t", " the", "er", " a", "on", "re", " s", "é", "日本", "rT")
CORPUS = "The quick brown fox jumps over the lazy dog. A generator yields values one by one, and keeps its state.\n"


def write_tiktoken(path: Path, merges: tuple[str, ...] = MERGES) -> Path:
    """A TikTokenizer's list: the bytes, then what is merged, each out of what stands before it."""
    pieces = [bytes([value]) for value in range(256)] + [text.encode() for text in merges]
    listed = [
        {"rank": rank, "token_bytes": base64.b64encode(piece).decode(), "token_str": piece.decode("utf-8", "replace")}
        for rank, piece in enumerate(pieces)
    ]
    path.write_text(json.dumps(listed), "utf-8")
    return path


def write_gpt2(directory: Path) -> tuple[Path, Path]:
    """GPT-2's two files, trained on a line; `<|endoftext|>` is the last token."""
    import tokenizers

    trained = tokenizers.ByteLevelBPETokenizer()
    trained.train_from_iterator([CORPUS] * 20, vocab_size=300, special_tokens=[], show_progress=False)
    vocab, merges = directory / "vocab.json", directory / "merges.txt"
    trained.save_model(str(directory))
    ids = json.loads(vocab.read_text("utf-8"))
    vocab.write_text(json.dumps(ids | {"<|endoftext|>": len(ids)}), "utf-8")
    return vocab, merges


def write_sentencepiece(path: Path) -> Path:
    """A model of byte pairs with bytes to fall back on, as Llama 2 has; ids 0 to 2 are <unk>, <s> and </s>."""
    import sentencepiece

    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([CORPUS] * 20),
        model_prefix=str(path.with_suffix("")),
        vocab_size=300,
        model_type="bpe",
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return path.with_suffix(".model")
