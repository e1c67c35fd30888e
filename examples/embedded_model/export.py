"""Export of a trained model: weights, configuration, tokenizer, and a model card with measurements."""

from __future__ import annotations

import platform
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import torch
from tokenizers import Tokenizer

from examples.embedded_model.conversations import held_out_exchanges
from examples.embedded_model.corpus import ASSISTANT, END, SYSTEM, USER, held_out_documents
from examples.embedded_model.evaluation import (
    EVALUATION_LENGTH,
    both_logits,
    held_out_tokens,
    language_model_loss,
    unigram_entropy,
    windows,
)
from examples.embedded_model.recipe import Recipe
from examples.embedded_model.tool_evaluation import tool_scores
from megatron_ext import load_engine
from megatron_ext.config import ModelConfig, SourceConfig
from megatron_ext.config.differences import EMBEDDED_MODEL_DIR
from megatron_ext.mcore.layers.hybrid_model import HybridModel
from megatron_ext.models.huggingface.export import save_hf_checkpoint
from megatron_ext.models.load import load_model
from megatron_ext.text.tokenizer_files import read_chat_templates

CARD = "README.md"
TOKENIZER_FILES = ("chat_template.jinja", "tokenizer_config.json")  # of the shipped model; written by hand
STAGE = "\n## Stage: "
ZERO_STATES_EVERY = 64  # tokens, in the report
TOOL_PROMPTS = 200


class Trained(Protocol):
    """Training whose model is exported."""

    config: ModelConfig
    recipe: Recipe
    tokenizer: Tokenizer
    model: HybridModel
    step: int


@dataclass(frozen=True)
class Row:
    """Line of the table of measured values."""

    name: str
    value: str


def export(training: Trained, directory: Path, name: str, trained_tokens: int, initial: Path | None) -> None:
    """Write weights in bf16, configuration, tokenizer and model card.

    Args:
        training: Model and recipe.
        directory: Made if it is missing; files of the same names are replaced.
        name: Name of this stage of training.
        trained_tokens: Length of the text.
        initial: Exported model with which the training began; its card lists the stages before.
    """
    before = stages(initial / CARD) if initial is not None and (initial / CARD).is_file() else ""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer, exported = Path(folder) / "tokenizer", Path(folder) / "exported"
        tokenizer.mkdir()
        training.tokenizer.save(str(tokenizer / "tokenizer.json"))
        for file in TOKENIZER_FILES:
            shutil.copy(EMBEDDED_MODEL_DIR / file, tokenizer)
        save_hf_checkpoint(exported, training.model, training.config, tokenizer, torch.bfloat16)
        shutil.copytree(exported, directory, dirs_exist_ok=True)
    rows = [*losses(directory), *tools(directory)]
    for row in rows:
        print(f"{row.name}: {row.value}")
    card = model_card(training, rows) + before + stage(training, name, trained_tokens)
    (directory / CARD).write_text(card, encoding="utf-8")
    print(f"exported to {directory} after {training.step} steps")


def losses(directory: Path) -> list[Row]:
    """Return losses of an exported model on the held-out text, and of how many tokens its head predicts the trunk's."""
    source = SourceConfig(load_hf=str(directory))
    loaded = load_model(source, {}, device=torch.device("cpu"), reads_prediction=True)
    model, tokens = loaded.model, held_out_tokens(loaded.tokenizer)
    measured = windows(tokens, EVALUATION_LENGTH)
    cut = language_model_loss(model, *measured, zero_states_every=ZERO_STATES_EVERY)
    rows = [
        Row("held-out loss, nats per token", f"{language_model_loss(model, *measured):.3f}"),
        Row(f"the same, Mamba states zeroed every {ZERO_STATES_EVERY} tokens", f"{cut:.3f}"),
        Row("entropy of the held-out unigrams, nats per token", f"{unigram_entropy(tokens):.3f}"),
    ]
    if loaded.config.mtp_num_layers:
        rows.append(
            Row("held-out text: head and trunk agree on the likeliest token", f"{agreement(model, measured[0]):.1%}")
        )
    return rows


@torch.no_grad()
def agreement(model: HybridModel, inputs: torch.Tensor) -> float:
    """Return the share of tokens of windows [n, s] after which head and trunk have the same most likely token."""
    equal = [(a.argmax(-1) == b.argmax(-1)).float() for a, b in (both_logits(model, one[None]) for one in inputs)]
    return torch.cat(equal, dim=1).mean().item()


def tools(directory: Path) -> list[Row]:
    """Return scores of tool calls on held-out prompts, without and with thinking."""
    template = read_chat_templates(directory).chosen(has_tools=True)
    assert template is not None
    exchanges = list(held_out_exchanges(held_out_documents(), TOOL_PROMPTS))
    rows: list[Row] = []
    with load_engine(load_hf=str(directory)) as engine:
        for name, thinks in (("", False), (", after thinking", True)):
            scores = tool_scores(engine, template, exchanges, thinks=thinks)
            rows += [
                Row(f"held-out tool prompts{name}: {what}", f"{share:.1%}")
                for what, share in (
                    ("one call of a function that exists", scores.calls),
                    ("of the right one", scores.functions),
                    ("and its arguments are JSON", scores.valid),
                    ("and they are right", scores.right),
                )
            ]
    return rows


def stages(card: Path) -> str:
    """Return the part of a model card about the stages of its training."""
    _, mark, text = card.read_text(encoding="utf-8").partition(STAGE)
    return mark + text


def stage(training: Trained, name: str, trained_tokens: int) -> str:
    """Return the part of a model card about one training."""
    versions = f"torch {torch.__version__} and Python {platform.python_version()}"
    recipe = "\n".join(f"| {name} | {value} |" for name, value in asdict(training.recipe).items())
    return f"""{STAGE}{name}

{training.step} steps over {trained_tokens:,} tokens, with {versions}.

| | |
|---|---|
{recipe}
"""


def model_card(training: Trained, rows: list[Row]) -> str:
    """Return the README that is saved with the weights, without the stages of training."""
    parameters = sum(parameter.numel() for parameter in training.model.parameters())
    head = sum(p.numel() for name, p in training.model.named_parameters() if name.startswith("mtp."))
    pattern = training.config.hybrid_override_pattern
    table = "\n".join(f"| {row.name} | {row.value} |" for row in rows)
    return f"""# The embedded model

A hybrid language model of {parameters:,} parameters, so that the package has something real to run. Layers `{pattern}`
(M Mamba-2, * attention, - MLP), tied embeddings, no position embedding. {head:,} parameters are a layer of multi-token
prediction (`{training.config.mtp_pattern}`), which is read for `--speculative-method mtp` only. The files are those of
a NemotronH in Hugging Face's layout.

It writes sentences that look like Python's documentation, calls functions, often with a wrong argument, and repeats
what they return. It knows nothing and must not be asked for facts.

Text: the help topics of `pydoc_data.topics` and the docstrings of Python's standard library (PSF licence),
conversations made of them, and synthetic conversations with function calls and thinking.
`examples/embedded_model/corpus.py` reads it and removes repeats, `conversations.py` makes the synthetic ones. About 4 %
of the text is held out, and no paragraph of it longer than a phrase is trained on; of the names of functions and of
arguments an eighth is held out.

| measured on the exported bf16 weights | |
|---|---|
{table}

Losses are of windows of {EVALUATION_LENGTH} tokens, computed in fp32. The unigram entropy is that of the held-out text
itself: no unigram model is better. Tool prompts: {TOOL_PROMPTS}, with one to three functions, answered greedily.

Conversations look like this, without spaces or line breaks between the parts:
`{SYSTEM}You are a helpful assistant.{END}{USER}What does json.loads do?{END}{ASSISTANT}`; the answer ends with
`{END}`. With the template's variable `enable_thinking` it begins with `<think>`. `<|endoftext|>` (id 0)
stands between documents. Another Python version has slightly other text.
"""
