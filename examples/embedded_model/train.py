r"""Train the small hybrid language model that is shipped with the package, on text that comes with Python.

Three commands, each of which begins with what the one before has exported:

    python -m examples.embedded_model.train --stage text --output out/text --checkpoint out/text.pt \
        --tool-conversations 0 --thinking-chats 0 --plain-chats 0 --steps 2000 --decay-steps 800 \
        --batch-size 4 --length 512 --learning-rate 3e-3
    python -m examples.embedded_model.train --initial out/text --output out/trunk
    python -m examples.embedded_model.head --initial out/trunk

Stop one at any time and start it again with the same flags: it goes on at its last checkpoint, and the weights become
exactly the same as without the stop. When the steps are done it measures and exports.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from tqdm import tqdm

from examples.embedded_model.chats import training_conversations
from examples.embedded_model.corpus import ASSISTANT, END, SYSTEM, USER, Document, chat_documents, training_documents
from examples.embedded_model.evaluation import encode_documents, positions
from examples.embedded_model.export import export
from examples.embedded_model.recipe import Recipe, learning_rate, same_so_far
from megatron_ext.config import ModelConfig
from megatron_ext.config.differences import EMBEDDED_MODEL_DIR
from megatron_ext.mcore.layers.hybrid_model import HybridModel
from megatron_ext.models.build import build_model
from megatron_ext.models.huggingface.hf_checkpoint import load_hf_weights
from megatron_ext.text.tokenizer_files import read_chat_templates

VOCABULARY = 4096
SPECIAL_TOKENS = ("<|endoftext|>", SYSTEM, USER, ASSISTANT, END)  # ids 0 to 4
END_OF_DOCUMENT = 0
THINK = "<think>"
IGNORED = -100  # target
MODEL = ModelConfig(
    hybrid_override_pattern="M-M*M-M-",
    hidden_size=192,
    num_attention_heads=4,
    num_query_groups=2,
    mamba_state_dim=64,
    mamba_head_dim=32,
    mamba_num_groups=2,
    mamba_chunk_size=64,
    squared_relu=True,
    vocab_size=VOCABULARY,
    max_position_embeddings=4096,
)
NOT_DECAYED = ("bias", "norm.weight", "A_log", ".D")  # ends of parameter names
ADAM_BETAS = (0.9, 0.95)


class Batches:
    """Windows of one long row of tokens; the windows of a step depend on the seed and the step only."""

    def __init__(self, tokens: Tensor, recipe: Recipe) -> None:
        self.tokens = tokens
        self.recipe = recipe
        self.windows = (len(tokens) - 1) // recipe.length - 1  # one less: every epoch shifts them by an offset
        if self.windows < recipe.batch_size:
            raise SystemExit(f"{len(tokens)} tokens are too few for {recipe.batch_size} windows of {recipe.length}")

    def at(self, step: int) -> tuple[Tensor, Tensor]:
        """Return inputs and next tokens of a step, each [b, s]."""
        numbers = range(step * self.recipe.batch_size, (step + 1) * self.recipe.batch_size)
        rows = torch.stack([self._window(number) for number in numbers])
        return rows[:, :-1], rows[:, 1:]

    def _window(self, row: int) -> Tensor:
        epoch, index = divmod(row, self.windows)
        generator = torch.Generator().manual_seed(self.recipe.seed * 1_000_003 + epoch)
        offset = torch.randint(self.recipe.length, (), generator=generator).item()
        window = torch.randperm(self.windows, generator=generator)[index].item()
        start = offset + window * self.recipe.length
        return self.tokens[start : start + self.recipe.length + 1]


class Training:
    """Model, optimizer and the number of steps done.

    Args:
        config: Architecture.
        recipe: Settings.
        tokenizer: Exported with the weights.
        model: First weights; parameters without gradients are not trained.
    """

    def __init__(self, config: ModelConfig, recipe: Recipe, tokenizer: Tokenizer, model: HybridModel) -> None:
        self.config = config
        self.recipe = recipe
        self.tokenizer = tokenizer
        self.model = model.train()
        self._thinking = tokenizer.encode(ASSISTANT + THINK).ids
        self.optimizer = torch.optim.AdamW(parameter_groups(self.model, recipe.weight_decay), betas=ADAM_BETAS)
        self.step = 0

    def advance(self, batches: Batches) -> float:
        """Take one optimizer step; return the batch's loss in nats per token."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.step, self.recipe)
        loss = self.loss(*batches.at(self.step))
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.gradient_norm)
        self.optimizer.step()
        self.step += 1
        return loss.item()

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of windows, nats per token, without the tokens that open a thinking turn.

        The chat template writes them where thinking is enabled; a model that learned them would think unasked.
        """
        logits = self.model(inputs, positions(inputs), None)
        learned = targets.masked_fill(after_first(targets, self._thinking), IGNORED)
        return F.cross_entropy(logits.float().flatten(0, 1), learned.flatten(), ignore_index=IGNORED)

    def save(self, path: Path) -> None:
        """Write the state that the next step depends on; the file is replaced atomically."""
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".unfinished")
        state = {
            "config": self.config.to_dict(),
            "recipe": asdict(self.recipe),
            "tokenizer": self.tokenizer.to_str(),
            "model": dict(self.model.named_parameters()),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
        }
        torch.save(state, unfinished)
        os.replace(unfinished, path)

    def load(self, path: Path) -> None:
        """Restore the state that `save` wrote.

        Raises:
            SystemExit: The checkpoint belongs to another model, recipe or text.
        """
        state = torch.load(path, weights_only=True)
        fits = {
            "model": ModelConfig(**state["config"]) == self.config,
            "recipe": same_so_far(Recipe(**state["recipe"]), self.recipe, state["step"]),
            "text": state["tokenizer"] == self.tokenizer.to_str(),
        }
        if not all(fits.values()):
            others = ", ".join(name for name, fit in fits.items() if not fit)
            raise SystemExit(f"{path} was made with another {others}; delete it or give --checkpoint")
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(state["model"][name])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]


def after_first(tokens: Tensor, sequence: list[int]) -> Tensor:
    """Return where tokens [b, s] are those after the first one of a sequence that occurs as a whole: [b, s] bool."""
    found = (tokens.unfold(1, len(sequence), 1) == torch.tensor(sequence)).all(-1)  # [b, s - len(sequence) + 1]
    marked = torch.zeros_like(tokens, dtype=torch.bool)
    for offset in range(1, len(sequence)):
        marked[:, offset : offset + found.shape[1]] |= found
    return marked


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Return groups of the trained parameters: matrices decay, norms, biases and recurrent parameters do not."""
    decayed: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        (others if name.endswith(NOT_DECAYED) else decayed).append(parameter)
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


def train_tokenizer(texts: list[str], vocabulary: int = VOCABULARY) -> Tokenizer:
    """Train a byte-level BPE tokenizer, which encodes every text and decodes it exactly."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def training_tokens(tokenizer: Tokenizer, documents: list[Document], recipe: Recipe) -> Tensor:
    """Return the documents and all conversations in one row, in random order."""
    template = read_chat_templates(EMBEDDED_MODEL_DIR).chosen(has_tools=True)
    assert template is not None
    more = training_conversations(
        documents, template, recipe.tool_conversations, thinking=recipe.thinking_chats, plain=recipe.plain_chats
    )
    texts = [*(document.text for document in documents), *chat_documents(documents), *more]
    return encode_documents(shuffled(texts, recipe.seed), lambda text: tokenizer.encode(text).ids, END_OF_DOCUMENT)


def first_model(recipe: Recipe, initial: Path | None) -> HybridModel:
    """Return the model that training begins with: an exported one, or one of random weights."""
    model = build_model(MODEL, seed=recipe.seed)
    if initial is not None:
        load_hf_weights(model, MODEL, initial)
    return model


def shuffled(texts: list[str], seed: int) -> list[str]:
    """Return the texts in random order, so that neighbours in the packed row are unrelated."""
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(seed))
    return [texts[index] for index in order.tolist()]


def train(training: Training, batches: Batches, arguments: argparse.Namespace) -> None:
    """Run the remaining steps; save a checkpoint every few minutes and when interrupted."""
    saved_at = time.monotonic()
    steps = training.recipe.steps
    try:
        with tqdm(total=steps, initial=training.step, unit="step", mininterval=arguments.progress_seconds) as bar:
            average = math.nan
            while training.step < steps:
                loss = training.advance(batches)
                average = loss if math.isnan(average) else 0.98 * average + 0.02 * loss
                bar.set_postfix(loss=f"{average:.3f}", refresh=False)
                bar.update()
                if time.monotonic() - saved_at > arguments.save_seconds:
                    training.save(arguments.checkpoint)
                    saved_at = time.monotonic()
    finally:
        training.save(arguments.checkpoint)


def add_arguments(parser: argparse.ArgumentParser, recipe: Recipe, checkpoint: Path) -> None:
    """Add the arguments of a training; their defaults are the values of the recipe."""
    parser.add_argument("--output", type=Path, default=EMBEDDED_MODEL_DIR, help="folder to export to")
    parser.add_argument("--initial", type=Path, help="exported model to begin with; default: random weights")
    parser.add_argument("--checkpoint", type=Path, default=checkpoint, help="resumed if it exists")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of torch")
    parser.add_argument("--save-seconds", type=float, default=120, help="time between checkpoints")
    parser.add_argument("--progress-seconds", type=float, default=1, help="time between updates of the progress bar")
    parser.add_argument("--export-only", action="store_true", help="measure and export the checkpoint as it is")
    for name, default in asdict(recipe).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)


def recipe_of(arguments: argparse.Namespace) -> Recipe:
    """Return the recipe that the arguments describe."""
    return Recipe(**{name: getattr(arguments, name) for name in asdict(Recipe())})


def run(training: Training, batches: Batches, arguments: argparse.Namespace) -> None:
    """Train, or go on at the checkpoint, unless it is only to be exported."""
    if arguments.checkpoint.exists():
        training.load(arguments.checkpoint)
        print(f"going on at step {training.step}")
    elif arguments.export_only:
        sys.exit(f"{arguments.checkpoint} does not exist; nothing to export")
    if not arguments.export_only:
        train(training, batches, arguments)


def main(argv: list[str] | None = None) -> None:
    """Train, or continue to train, then evaluate and export."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, Recipe(), Path("out/embedded_model.pt"))
    parser.add_argument("--stage", default="text, tool calls and thinking", help="its name in the model card")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(arguments.threads)
    recipe = recipe_of(arguments)
    documents = training_documents()
    tokenizer = train_tokenizer([document.text for document in documents])
    tokens = training_tokens(tokenizer, documents, recipe)
    training = Training(MODEL, recipe, tokenizer, first_model(recipe, arguments.initial))
    run(training, Batches(tokens, recipe), arguments)
    export(training, arguments.output, arguments.stage, len(tokens), arguments.initial)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
