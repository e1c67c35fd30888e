"""Reinforcement learning in one process: sample a group of answers, take a step of training, write the weights back.

    python -m examples.python.rl_loop

Each prompt is answered eight times, from one prefill: one request computes it, seven find it cached. After each step of
training the engine gets the new weights in place, and forgets what it had cached with the old ones. What it gives then
is what an engine gives that is loaded with them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_ext import LoadedEngine, RequestParams, RequestRecord, load_engine
from megatron_ext.config import SourceConfig
from megatron_ext.models.load import load_model

PROMPT = (
    "The import statement combines two operations; it searches for the named module, then it binds the results of that "
    "search to a name in the local scope. The search operation of the import statement is defined as a call to the "
    "__import__() function, with the appropriate arguments. The return value of __import__()"
)
SAMPLES = 8
PARAMS = RequestParams(num_tokens_to_generate=16, temperature=1.0, ignore_eos=True)
BLOCK = 16  # tokens: what is found in the cache is whole blocks


@dataclass(frozen=True)
class Round:
    """Records and reward of one round."""

    records: tuple[RequestRecord, ...]
    reward: float  # the group's mean

    @property
    def skip_rate(self) -> float:
        """Fraction of the prompts' tokens that was not computed."""
        skipped = sum(record.skipped_prefill_token_count for record in self.records)
        return skipped / sum(record.prompt_token_count for record in self.records)


def sample(engine: LoadedEngine, seed: int) -> Round:
    """Generate a group of answers to one prompt; each has its own seed, so a run can be repeated."""
    params = [replace(PARAMS, seed=seed * SAMPLES + index) for index in range(SAMPLES)]
    records = engine.generate([PROMPT] * SAMPLES, params)
    return Round(tuple(records), sum(map(reward, records)) / SAMPLES)


def reward(record: RequestRecord) -> float:
    """Return the reward of an answer: spaces per token."""
    return record.generated_text.count(" ") / len(record.generated_tokens)


def train(policy: nn.Module, optimizer: torch.optim.Optimizer, group: Round) -> None:
    """Take one step of REINFORCE, with the group's mean reward as the baseline."""
    loss = torch.zeros(())
    for record in group.records:
        tokens = torch.tensor([*record.prompt_tokens, *record.generated_tokens])
        loss = loss - (reward(record) - group.reward) / SAMPLES * log_prob(policy, tokens, record.prompt_token_count)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def log_prob(policy: nn.Module, tokens: Tensor, prompt_length: int) -> Tensor:
    """Return the policy's log-prob of all generated tokens."""
    inputs = tokens[None, :-1]
    positions = torch.arange(inputs.shape[1])[None]
    logits = policy(input_ids=inputs, position_ids=positions, attention_mask=None)  # [1, tokens, vocabulary]
    log_probs = F.log_softmax(logits[0].float(), dim=-1).gather(1, tokens[1:, None])[:, 0]
    return log_probs[prompt_length - 1 :].sum()


def load() -> LoadedEngine:
    """Load an engine of the embedded model."""
    return load_engine(inference_dynamic_batching_block_size=BLOCK, inference_dynamic_batching_buffer_size_gb=0.1)


def run(engine: LoadedEngine, policy: nn.Module, rounds: int) -> list[Round]:
    """Sample and train in turns; return the group of each round."""
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
    done = []
    for index in range(rounds):
        done.append(sample(engine, seed=index))
        train(policy, optimizer, done[-1])
        engine.update_weights(policy.named_parameters())  # in place, all or nothing; the cache is emptied
    return done


def main(rounds: int = 5) -> None:
    """Train the embedded model a little, and check that a new engine with the trained weights has the same outputs."""
    policy = load_model(SourceConfig(), {}).model.train()
    with load() as engine:
        for index, group in enumerate(run(engine, policy, rounds)):
            print(f"round {index}: reward {group.reward:.3f}, {group.skip_rate:.0%} of the prompts' tokens skipped")
        last = sample(engine, seed=rounds)
        with load() as fresh:
            fresh.update_weights(policy.named_parameters())
            again = sample(fresh, seed=rounds)
    same = [one.generated_tokens for one in last.records] == [one.generated_tokens for one in again.records]
    print(f"after the last update: reward {last.reward:.3f}; a fresh engine gives the same answers: {same}")


if __name__ == "__main__":
    main()
