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
