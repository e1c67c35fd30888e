"""Tokenizers as Llama checkpoints have them, small: files as they are published, in a directory."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

SENTENCES = (
    "the quick brown fox, naïve as ever, jumps over the lazy dog",
    "What is the capital of France? Paris is the capital of France.",
)


def begin_with(token: str, token_id: int) -> processors.TemplateProcessing:
    """Puts a special token before every text."""
    return processors.TemplateProcessing(single=f"{token} $A", special_tokens=[(token, token_id)])


def save(tokenizer: Tokenizer, directory: Path, **config: object) -> Path:
    """Write `tokenizer.json` and `tokenizer_config.json`."""
    directory.mkdir(exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def _added(token: str) -> dict[str, object]:
    """The long form of a special token in `tokenizer_config.json`."""
    places = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
    return {"__type": "AddedToken", "content": token} | places


def llama_2(directory: Path) -> Path:
    """Pieces with spaces as "▁", unknown characters as bytes, <s> before each text."""
    special = ["<unk>", "<s>", "</s>"]
    alphabet = [f"<0x{byte:02X}>" for byte in range(256)]
    space = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trained = Tokenizer(models.BPE())
    trained.normalizer = space
    trained.train_from_iterator(SENTENCES[:1], trainers.BpeTrainer(vocab_size=60, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    pieces = [*special, *alphabet, *sorted(model["vocab"], key=model["vocab"].get)]
    tokenizer = Tokenizer(
        models.BPE(
            {piece: index for index, piece in enumerate(pieces)},
            [tuple(merge) for merge in model["merges"]],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = space
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = begin_with("<s>", 1)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    return save(
        tokenizer,
        directory,
        add_bos_token=True,
        add_eos_token=False,
        bos_token=_added("<s>"),
        eos_token=_added("</s>"),
        unk_token=_added("<unk>"),
        tokenizer_class="PreTrainedTokenizerFast",
    )


def llama_3(directory: Path) -> Path:
    """Bytes, <|begin_of_text|> before each text, special tokens around the turns of a conversation."""
    special = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(SENTENCES, trainer)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    begin = tokenizer.token_to_id(special[0])
    tokenizer.post_processor = processors.Sequence(
        [processors.ByteLevel(trim_offsets=True), begin_with(special[0], begin)]
    )
    return save(
        tokenizer,
        directory,
        bos_token="<|begin_of_text|>",
        eos_token="<|eot_id|>",
        clean_up_tokenization_spaces=True,
        model_input_names=["input_ids", "attention_mask"],
        tokenizer_class="PreTrainedTokenizerFast",
    )


def words(directory: Path, size: int) -> Path:
    """A tokenizer of `size` ids: <s> (before each text), </s>, and words "w2", "w3", ..."""
    pieces = ["<s>", "</s>", *(f"w{index}" for index in range(2, size))]
    tokenizer = Tokenizer(models.WordLevel({piece: index for index, piece in enumerate(pieces)}, unk_token="w2"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = begin_with("<s>", 0)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in pieces[:2]])
    return save(tokenizer, directory, bos_token="<s>", eos_token="</s>", tokenizer_class="PreTrainedTokenizerFast")


def unigram(directory: Path) -> Path:
    """Pieces with scores, the special ones among them with the best score; a space before the first text only."""
    special = ["<pad>", "</s>", "<unk>"]
    alphabet = sorted({*"▁<|>/[]", *"".join(SENTENCES).replace(" ", ""), *"psendusytmabkr"})
    vocabulary = [(piece, 0.0) for piece in special] + [(piece, -9.0) for piece in alphabet]
    tokenizer = Tokenizer(models.Unigram([*vocabulary, ("▁the", -5.0), ("▁is", -5.0), ("er", -6.0)], unk_id=2))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    return save(tokenizer, directory, eos_token="</s>", unk_token="<unk>", tokenizer_class="PreTrainedTokenizerFast")


def word_pieces(directory: Path) -> Path:
    """Tokenizer that lower-cases text before it looks for special tokens; one swallows the space after it."""
    pieces = ["[UNK]", "[SEP]", "<turn>", *(f"{mark}{one}" for mark in ("", "##") for one in _LETTERS)]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(
        [AddedToken("[UNK]"), AddedToken("[SEP]", rstrip=True), AddedToken("<turn>", normalized=True)]
    )
    return save(tokenizer, directory, eos_token="[SEP]", unk_token="[UNK]", tokenizer_class="PreTrainedTokenizerFast")


_LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789.,?<>|/[]:"


def in_python(directory: Path) -> Path:
    """A tokenizer of transformers that is written in Python, from vocab.json and merges.txt."""
    directory.mkdir(exist_ok=True)
    pieces = ["<unk>", "<s>", "</s>", *(f"{one}{end}" for one in _LETTERS.upper() + _LETTERS for end in ("", "@@"))]
    vocabulary = {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}
    (directory / "vocab.json").write_text(json.dumps(vocabulary))
    (directory / "merges.txt").write_text("#version: 0.2\n")
    config = {"tokenizer_class": "CTRLTokenizer", "unk_token": "<unk>", "eos_token": "</s>", "bos_token": "<s>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory
