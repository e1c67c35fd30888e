"""Train one layer of multi-token prediction on the frozen trunk of an exported model, and export both.

    python -m examples.embedded_model.head --initial TRUNK --output DIR

Its target is what it drafts for: the trunk's own distribution of the token after the next one, not the text's token.
Like `train` it goes on at its last checkpoint when it is started again.
"""

from __future__ import annotations

import argparse
import contextlib
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from examples.embedded_model.corpus import training_documents
from examples.embedded_model.evaluation import both_logits, positions
from examples.embedded_model.export import export
from examples.embedded_model.recipe import Recipe
from examples.embedded_model.train import Batches, Training, add_arguments, recipe_of, run, training_tokens
from megatron_ext.config import ModelConfig, SourceConfig
from megatron_ext.mcore.layers.hybrid_model import HybridModel
from megatron_ext.models.build import build_model
from megatron_ext.models.load import load_model

PATTERN = "*"  # layers of the head
FITTED_WINDOWS = 12
RECIPE = Recipe(steps=300, decay_steps=200, learning_rate=2e-3, warmup_steps=20)


class HeadTraining(Training):
    """Training of the head alone.

    Args:
        trunk: Exported model.
        recipe: Settings.
    """

    def __init__(self, trunk: Path, recipe: Recipe) -> None:
        tokenizer = Tokenizer.from_file(str(trunk / "tokenizer.json"))
        loaded = load_model(SourceConfig(load_hf=str(trunk)), {}, device=torch.device("cpu"))
        model = with_head(loaded.model, loaded.config, seed=recipe.seed)
        super().__init__(with_prediction(loaded.config), recipe, tokenizer, model)

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the cross entropy between the trunk's distributions and the head's, nats per token."""
        trunk, head = both_logits(self.model, inputs)
        return F.cross_entropy(head.flatten(0, 1), trunk.softmax(dim=-1).flatten(0, 1))


def with_prediction(config: ModelConfig) -> ModelConfig:
    """Return a model's configuration with the head."""
    return replace(config, mtp_num_layers=1, mtp_hybrid_override_pattern=PATTERN)


def with_head(trunk: HybridModel, config: ModelConfig, seed: int) -> HybridModel:
    """Return a model with the weights of a trunk, of which only the head's parameters are trained."""
    model = build_model(with_prediction(config), seed=seed)
    theirs = dict(trunk.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in theirs:
                parameter.copy_(theirs[name]).requires_grad_(False)
    return model


@torch.no_grad()
def fit_projection(model: HybridModel, tokens: Tensor) -> None:
    """Set the projection to the least squares fit of the trunk's next hidden state, [b, s] tokens.

    The head then begins close to the trunk, which saves most of the steps.
    """
    assert model.mtp is not None
    layer, scale = model.mtp.layer_of(1), model.get_parameter("decoder.final_norm.weight")
    embedded = model.embedding(tokens, positions(tokens))
    hidden = model.decoder(embedded, None)
    inputs = torch.cat((layer.enorm(embedded[1:]), layer.hnorm(hidden[:-1])), dim=-1).flatten(0, 1)
    found = torch.linalg.lstsq(inputs, (hidden[1:] / scale).flatten(0, 1)).solution
    layer.get_parameter("eh_proj.weight").copy_(found.T)
    layer.get_parameter("final_layernorm.weight").copy_(scale)


def main(argv: list[str] | None = None) -> None:
    """Train the head, or continue to, then evaluate and export."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, RECIPE, checkpoint=Path("out/embedded_head.pt"))
    arguments = parser.parse_args(argv)
    if arguments.initial is None:
        parser.error("--initial is needed: the exported trunk")
    torch.set_num_threads(arguments.threads)
    recipe = recipe_of(arguments)
    training = HeadTraining(arguments.initial, recipe)
    tokens = training_tokens(training.tokenizer, training_documents(), recipe)
    fit_projection(training.model, tokens[: FITTED_WINDOWS * recipe.length].unflatten(0, (FITTED_WINDOWS, -1)))
    run(training, Batches(tokens, recipe), arguments)
    export(training, arguments.output, "the layer of multi-token prediction", len(tokens), arguments.initial)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
