"""Settings of a training, and its learning rate."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Recipe:
    """Settings that determine the weights; `steps` and `decay_steps` may change while the learning rate is constant."""

    steps: int = 640
    decay_steps: int = 297  # the last ones
    batch_size: int = 2  # windows a step
    length: int = 1024  # tokens a window
    tool_conversations: int = 3000
    thinking_chats: int = 1000
    plain_chats: int = 2000
    learning_rate: float = 2e-3
    final_learning_rate: float = 1e-4
    warmup_steps: int = 100
    weight_decay: float = 0.1
    gradient_norm: float = 1.0
    seed: int = 1234


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
