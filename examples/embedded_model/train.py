"""Train the small hybrid language model that is shipped with the package, on text that comes with Python.

Stop it at any time and start it again with the same flags: it goes on at its last checkpoint, and the weights become
exactly those of a run without the stop. When the steps are done it measures and exports.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import platform
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from tqdm import tqdm

from examples.embedded_model.corpus import ASSISTANT, END, SYSTEM, USER, chat_documents, training_documents
from examples.embedded_model.evaluation import (
    EVALUATION_LENGTH,
    encode_documents,
    held_out_tokens,
    language_model_loss,
    positions,
    unigram_entropy,
    windows,
)
from megatron_ext.config import ModelConfig
from megatron_ext.config.embedded import EMBEDDED_MODEL_DIR
from megatron_ext.models.build import build_model
from megatron_ext.models.native.safetensors_checkpoint import load_checkpoint, save_checkpoint
from megatron_ext.text.tokenizer import TextTokenizer

VOCABULARY = 4096
SPECIAL_TOKENS = ("<|endoftext|>", SYSTEM, USER, ASSISTANT, END)  # ids 0 to 4
END_OF_DOCUMENT = 0
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
ZERO_STATES_EVERY = 64  # tokens, in the report
NOT_DECAYED = ("bias", "norm.weight", "A_log", ".D")  # ends of parameter names
ADAM_BETAS = (0.9, 0.95)


@dataclass(frozen=True)
class Recipe:
    """Settings that determine the weights; `steps` and `decay_steps` may change while the learning rate is constant."""

    steps: int = 2000
    decay_steps: int = 800  # the last ones
    batch_size: int = 4  # windows a step
    length: int = 512  # tokens a window
    learning_rate: float = 3e-3
    final_learning_rate: float = 1e-4
    warmup_steps: int = 100
    weight_decay: float = 0.1
    gradient_norm: float = 1.0
    seed: int = 1234


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
    """Model, optimizer and the number of steps done."""

    def __init__(self, config: ModelConfig, recipe: Recipe, tokenizer: Tokenizer) -> None:
        self.config = config
        self.recipe = recipe
        self.tokenizer = tokenizer
        self.model = build_model(config, seed=recipe.seed).train()
        self.optimizer = torch.optim.AdamW(parameter_groups(self.model, recipe.weight_decay), betas=ADAM_BETAS)
        self.step = 0

    def advance(self, batches: Batches) -> float:
        """Take one optimizer step; return the batch's loss in nats per token."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.step, self.recipe)
        inputs, targets = batches.at(self.step)
        logits = self.model(inputs, positions(inputs), None)
        loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.gradient_norm)
        self.optimizer.step()
        self.step += 1
        return loss.item()

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


def learning_rate(step: int, recipe: Recipe) -> float:
    """Return the rate of a step: linear warm-up, constant, then half a cosine down to the final rate."""
    if step < recipe.warmup_steps:
        return recipe.learning_rate * (step + 1) / recipe.warmup_steps
    decayed = max(0, step - (recipe.steps - recipe.decay_steps)) / max(1, recipe.decay_steps)
    above_final = recipe.learning_rate - recipe.final_learning_rate
    return recipe.final_learning_rate + above_final * 0.5 * (1 + math.cos(math.pi * min(1.0, decayed)))


def same_so_far(old: Recipe, new: Recipe, steps_done: int) -> bool:
    """Return whether both recipes have the same first `steps_done` steps, so that training may go on with `new`."""
    planned = replace(old, steps=new.steps, decay_steps=new.decay_steps)
    return planned == new and all(learning_rate(step, old) == learning_rate(step, new) for step in range(steps_done))


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Return parameter groups: matrices decay; norms, biases and the recurrence's own parameters do not."""
    decayed: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
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


def training_text() -> tuple[list[str], list[str]]:
    """Return the documents and the conversations made of them."""
    documents = training_documents()
    return [document.text for document in documents], chat_documents(documents)


def shuffled(texts: list[str], seed: int) -> list[str]:
    """Return the texts in random order, so that neighbours in the packed row are unrelated."""
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(seed))
    return [texts[index] for index in order.tolist()]


def report(directory: Path) -> dict[str, float]:
    """Return losses of an exported model on the held-out split, nats per token."""
    model, _ = load_checkpoint(directory)
    tokens = held_out_tokens(TextTokenizer(directory))
    measured = windows(tokens, EVALUATION_LENGTH)
    return {
        "held-out loss": language_model_loss(model, *measured),
        f"held-out loss, Mamba states zeroed every {ZERO_STATES_EVERY} tokens": language_model_loss(
            model, *measured, zero_states_every=ZERO_STATES_EVERY
        ),
        "entropy of the held-out unigrams": unigram_entropy(tokens),
    }


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


def model_card(training: Training, losses: dict[str, float], trained_tokens: int) -> str:
    """Return the README that is saved with the weights."""
    parameters = sum(parameter.numel() for parameter in training.model.parameters())
    rows = "\n".join(f"| {name} | {value:.3f} |" for name, value in losses.items())
    recipe = "\n".join(f"| {name} | {value} |" for name, value in asdict(training.recipe).items())
    return f"""# The embedded model

A hybrid language model of {parameters:,} parameters, so that the package has something real to run. Layers
`{training.config.hybrid_override_pattern}` (M Mamba-2, * attention, - MLP), tied embeddings, no position embedding.
It writes sentences that look like Python's documentation. It knows nothing and must not be asked for facts.

Text: the help topics of `pydoc_data.topics` and the docstrings of Python {platform.python_version()}'s standard library
(PSF licence), and conversations made of them; {trained_tokens:,} tokens. `examples/embedded_model/corpus.py` reads
it and removes repeats. About 4 % of the text is held out, and no paragraph of it longer than a phrase is trained on.

| measured on the exported bf16 weights | nats per token |
|---|---|
{rows}

Windows of {EVALUATION_LENGTH} tokens, computed in fp32. The unigram entropy is that of the held-out text itself:
no unigram model is better.

Conversations look like this, without spaces or line breaks between the parts:
`{SYSTEM}You are a helpful assistant.{END}{USER}What does json.loads do?{END}{ASSISTANT}`; the answer ends with
`{END}`. `<|endoftext|>` (id 0) stands between documents.

Made by `python -m examples.embedded_model.train` with torch {torch.__version__}, {training.step} steps done. Another
Python version has slightly other text. The recipe:

| | |
|---|---|
{recipe}
"""


def export(training: Training, directory: Path, trained_tokens: int) -> None:
    """Write weights in bf16, configuration, tokenizer and model card."""
    card = directory / "README.md"
    card.unlink(missing_ok=True)  # a checkpoint replaces only a folder that holds nothing else
    with tempfile.TemporaryDirectory() as folder:
        tokenizer_file = Path(folder) / "tokenizer.json"
        training.tokenizer.save(str(tokenizer_file))
        save_checkpoint(directory, training.model, training.config, tokenizer_file, torch.bfloat16)
    losses = report(directory)
    for name, value in losses.items():
        print(f"{name}: {value:.4f} nats per token")
    card.write_text(model_card(training, losses, trained_tokens), encoding="utf-8")
    print(f"exported to {directory} after {training.step} steps")


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=EMBEDDED_MODEL_DIR, help="folder to export to")
    parser.add_argument("--checkpoint", type=Path, default=Path("out/embedded_model.pt"), help="resumed if it exists")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of torch")
    parser.add_argument("--save-seconds", type=float, default=120, help="time between checkpoints")
    parser.add_argument("--progress-seconds", type=float, default=1, help="time between updates of the progress bar")
    parser.add_argument("--export-only", action="store_true", help="measure and export the checkpoint as it is")
    for name, default in asdict(Recipe()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Train, or continue to train, then evaluate and export."""
    arguments = parse_arguments(argv)
    torch.set_num_threads(arguments.threads)
    recipe = Recipe(**{name: getattr(arguments, name) for name in asdict(Recipe())})
    documents, chats = training_text()
    tokenizer = train_tokenizer(documents)
    tokens = encode_documents(
        shuffled(documents + chats, recipe.seed), lambda text: tokenizer.encode(text).ids, END_OF_DOCUMENT
    )
    training = Training(MODEL, recipe, tokenizer)
    if arguments.checkpoint.exists():
        training.load(arguments.checkpoint)
        print(f"going on at step {training.step}")
    elif arguments.export_only:
        sys.exit(f"{arguments.checkpoint} does not exist; nothing to export")
    if not arguments.export_only:
        train(training, Batches(tokens, recipe), arguments)
    export(training, arguments.output, len(tokens))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
