"""GRPO on the embedded model, with an engine attached to the model that trains: on one process or on several ranks.

    python -m examples.python.rl_loop
    python -m examples.python.rl_loop --control
    torchrun --nproc-per-node 2 -m examples.python.rl_loop --tensor-model-parallel-size 2

The task: answer in one plain sentence of a few words, which a regular expression verifies. Each prompt is answered by a
group of samples and computed once. A step is only taken if the log-probs of the engine are those of the trainer's own
forward, and if each token was made by the weights of this step. `--control` shuffles the advantages, so that everything
happens but learning. It runs on a CPU; where there is a GPU, with `CUDA_VISIBLE_DEVICES=`.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from tqdm import tqdm

from examples.embedded_model.training_model import cpu_layers, load_training_model
from megatron_ext import AttachedEngine, EngineFollower, RequestParams, RequestRecord, attach_engine

TRAINED_ON = """json.loads os.path.join re.match random.choice zipfile.ZipFile csv.reader math.floor copy.copy glob.glob
    heapq.heappush bisect.bisect shutil.move time.sleep string.Template queue.Queue socket.socket""".split()
HELD_OUT = "json.dumps os.getcwd re.sub random.shuffle tarfile.open math.ceil copy.deepcopy logging.info".split()
PROMPT = "<|system|>You answer questions about Python. Answer in one or two sentences.<|end|>"
PROMPT += "<|user|>What does {} do?<|end|><|assistant|>"
STOP = "<|end|>"
PLAIN_SENTENCE = re.compile(r"[A-Z][a-z]+( [a-z]+){3,9}\.")
TOKENS = 20  # of an answer, at most
CLIP = 0.2
TOLERANCE = 1e-4  # of log-probs in fp32
SETTINGS = {"inference_dynamic_batching_block_size": 16, "inference_dynamic_batching_buffer_size_gb": 0.05}


@dataclass(frozen=True)
class Recipe:
    """Settings of a run; each is a flag.

    Attributes:
        prompts: Prompts of a step.
        group_size: Samples of a prompt.
        epochs: Updates from the samples of a step; the ratio is 1 in the first.
        control: True to shuffle the advantages.
    """

    steps: int = 12
    prompts: int = 4
    group_size: int = 8
    epochs: int = 2
    learning_rate: float = 1e-3
    seed: int = 0
    control: bool = False
    tensor_model_parallel_size: int = 1


@dataclass(frozen=True)
class Sample:
    """Answer of a rollout.

    Attributes:
        tokens: Prompt and answer.
        prompt_length: Tokens of the prompt.
        log_probs: Log-probs of the answer's tokens, by the engine.
        skipped: Tokens of the prompt that were not computed.
        reward: 1 for an answer in one plain sentence.
    """

    tokens: list[int]
    prompt_length: int
    log_probs: list[float]
    skipped: int
    reward: float


@dataclass
class Progress:
    """Course of a run.

    Attributes:
        before, after: Held-out rewards.
        samples: Samples of each step.
        differences: Largest difference of log-probs between engine and trainer, of each step.
    """

    before: float = 0.0
    after: float = 0.0
    samples: list[list[Sample]] = field(default_factory=list)
    differences: list[float] = field(default_factory=list)


def verify(record: RequestRecord) -> float:
    """Return the reward of an answer: 1 for a plain sentence that ends in time and repeats no word."""
    words = record.generated_text.split()
    is_plain = PLAIN_SENTENCE.fullmatch(record.generated_text) is not None
    return float(record.finish_reason == "stop" and is_plain and len(set(words)) == len(words))


def roll_out(
    engine: AttachedEngine | EngineFollower, names: Sequence[str], group: int, seed: int, version: int
) -> list[Sample]:
    """Answer each question `group` times with the weights of now; every rank calls this, and gets all samples."""
    samples: list[Sample] = []
    if isinstance(engine, EngineFollower):
        engine.follow()  # until the first rank suspends the engine
    else:
        engine.resume()
        engine.weights_changed(weights_version=version)
        samples = generate(engine, names, group, seed, version)
        engine.suspend()  # frees the pools for the trainer
    shared = [samples]
    dist.broadcast_object_list(shared, src=0)
    return shared[0]


def generate(engine: AttachedEngine, names: Sequence[str], group: int, seed: int, version: int) -> list[Sample]:
    """Sample groups of answers; each has a seed of its own, so that a run can be repeated."""
    prompts = [PROMPT.format(name) for name in names for _ in range(group)]
    params = RequestParams(
        num_tokens_to_generate=TOKENS,
        temperature=1.0,
        stop_token_ids=tuple(engine.tokenizer.tokenize(STOP)),
        return_log_probs=True,
        skip_prompt_log_probs=True,
    )
    records = engine.generate(prompts, [replace(params, seed=1_000 * seed + index) for index in range(len(prompts))])
    return [read(record, version) for record in records]


def read(record: RequestRecord, version: int) -> Sample:
    """Return the sample of a record.

    Raises:
        RuntimeError: A token was made by other weights.
    """
    made = record.generated_tokens
    if record.weights_version != ((version, len(made)),):
        raise RuntimeError(f"tokens were made by weights {record.weights_version}, and those of now are {version}")
    assert record.generated_log_probs is not None, "the parameters ask for them"
    return Sample(
        tokens=[*record.prompt_tokens, *made],
        prompt_length=record.prompt_token_count,
        log_probs=list(record.generated_log_probs),
        skipped=record.skipped_prefill_token_count,
        reward=verify(record),
    )


@dataclass(frozen=True)
class Batch:
    """Samples in rows of equal length.

    Attributes:
        tokens: [n, t + 1] int64, padded on the right.
        mask: [n, t], 1 for tokens of answers.
        log_probs: [n, t], by the engine; 0 elsewhere.
        advantages: [n].
    """

    tokens: Tensor
    mask: Tensor
    log_probs: Tensor
    advantages: Tensor

    @classmethod
    def of(cls, samples: Sequence[Sample], group: int) -> Batch:
        """Collect samples, whose neighbours form groups."""
        length = max(len(one.tokens) for one in samples)
        tokens = torch.zeros(len(samples), length, dtype=torch.int64)
        mask, log_probs = torch.zeros(2, len(samples), length - 1)
        for row, one in enumerate(samples):
            answer = slice(one.prompt_length - 1, len(one.tokens) - 1)  # a token is predicted at the place before it
            tokens[row, : len(one.tokens)] = torch.tensor(one.tokens)
            mask[row, answer] = 1
            log_probs[row, answer] = torch.tensor(one.log_probs)
        rewards = torch.tensor([one.reward for one in samples]).unflatten(0, (-1, group))
        spread = rewards.std(1, keepdim=True, unbiased=False)
        advantages = (rewards - rewards.mean(1, keepdim=True)) / (spread + 1e-6)
        return cls(tokens, mask, log_probs, advantages.flatten())


def forward(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the log-prob of each token after the first, [n, t], by the forward of megatron-core's model."""
    length = tokens.shape[1] - 1
    future = torch.ones(1, 1, length, length).triu(1).bool()
    positions = torch.arange(length).expand(len(tokens), -1)
    return -model(tokens[:, :-1], positions, future, labels=tokens[:, 1:])


def surrogate(log_probs: Tensor, batch: Batch) -> Tensor:
    """Return GRPO's clipped surrogate, as a loss: mean over the tokens of an answer, then over answers."""
    ratio = (log_probs - batch.log_probs).exp()
    advantages = batch.advantages[:, None]
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    return -((gain * batch.mask).sum(1) / batch.mask.sum(1)).mean()


def check(log_probs: Tensor, batch: Batch) -> float:
    """Return how far the engine's log-probs are from the trainer's.

    Raises:
        RuntimeError: Too far: the engine has computed with other weights, or on what other weights have left.
    """
    difference = ((log_probs - batch.log_probs) * batch.mask).abs().max().item()
    if difference > TOLERANCE:
        raise RuntimeError(f"log-probs of engine and trainer differ by {difference:.2g}")
    return difference


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch, epochs: int) -> float:
    """Check the samples of a step, and take its updates; return the result of the check."""
    difference = 0.0
    for epoch in range(epochs):
        log_probs = forward(model, batch.tokens)
        if epoch == 0:
            difference = check(log_probs, batch)
        optimizer.zero_grad()
        surrogate(log_probs, batch).backward()
        optimizer.step()
    return difference


def run(model: nn.Module, engine: AttachedEngine | EngineFollower, recipe: Recipe) -> Progress:
    """Train for some steps, with measurements before and after; every rank calls this."""
    draws = torch.Generator().manual_seed(recipe.seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=recipe.learning_rate)
    group, progress = recipe.group_size, Progress()
    progress.before = mean_reward(roll_out(engine, HELD_OUT, group, seed=0, version=0))
    bar = tqdm(range(recipe.steps), unit="step", disable=dist.get_rank() > 0)
    for step in bar:
        chosen = torch.randperm(len(TRAINED_ON), generator=draws)[: recipe.prompts]
        seed = 1 + recipe.seed * recipe.steps + step
        samples = roll_out(engine, [TRAINED_ON[index] for index in chosen], group, seed, version=step)
        batch = Batch.of(samples, group)
        if recipe.control:
            batch.advantages[:] = batch.advantages[torch.randperm(len(samples), generator=draws)]
        difference = train(model, optimizer, batch, recipe.epochs)
        progress.samples.append(samples)
        progress.differences.append(difference)
        bar.set_postfix(reward=f"{mean_reward(samples):.2f}", difference=f"{difference:.0e}")
    progress.after = mean_reward(roll_out(engine, HELD_OUT, group, seed=0, version=recipe.steps))
    return progress


def mean_reward(samples: Sequence[Sample]) -> float:
    """Return the mean reward."""
    return sum(one.reward for one in samples) / len(samples)


def skipped_share(samples: Sequence[Sample]) -> float:
    """Return the share of the prompts' tokens that was not computed."""
    return sum(one.skipped for one in samples) / sum(one.prompt_length for one in samples)


def read_recipe(argv: Sequence[str] | None) -> Recipe:
    """Return the settings of a command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in asdict(Recipe()).items():
        flag = f"--{name.replace('_', '-')}"
        if default is False:
            parser.add_argument(flag, action="store_true")
        else:
            parser.add_argument(flag, type=type(default), default=default, help=f"default: {default}")
    return Recipe(**vars(parser.parse_args(argv)))


def main(argv: Sequence[str] | None = None) -> Progress:
    """Train the embedded model in memory; the first rank prints the results."""
    recipe = read_recipe(argv)
    with cpu_layers():
        model, tokenizer = load_training_model(recipe.tensor_model_parallel_size)
        with attach_engine(model, tokenizer, **SETTINGS) as engine:
            progress = run(model, engine, recipe)
    if dist.get_rank() == 0:
        skipped = skipped_share([one for samples in progress.samples for one in samples])
        print(f"held-out reward: {progress.before:.3f} before, {progress.after:.3f} after {recipe.steps} steps")
        print(f"log-probs of engine and trainer: at most {max(progress.differences):.1e} apart")
        print(f"prompt tokens that were not computed: {skipped:.1%}")
    return progress


if __name__ == "__main__":
    main()
