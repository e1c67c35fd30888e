"""Schedulers, executors and engines of this rank, put together: rank 0's, and those that follow it."""

from __future__ import annotations

from functools import partial

from megatron_ext.engine.engine import Engine
from megatron_ext.engine.faults import Faults
from megatron_ext.engine.intake import Door
from megatron_ext.mcore.context import InferenceContext
from megatron_ext.mcore.controller import InferenceController
from megatron_ext.mcore.executor import StepExecutor
from megatron_ext.memory.plan import EnginePlan
from megatron_ext.ranks.fleet import Fleet
from megatron_ext.ranks.follower import Follower
from megatron_ext.ranks.journal import JournalledScheduler
from megatron_ext.ranks.team import Team
from megatron_ext.scheduling.scheduler import Scheduler
from megatron_ext.speculation.proposals import Proposals
from megatron_ext.text.bad_words import word_tokens
from megatron_ext.text.tokenizer import ends_of


def make_scheduler(plan: EnginePlan) -> Scheduler:
    """A scheduler without requests, the same on every rank."""
    return Scheduler(plan.limits, plan.policy, plan.fingerprint, plan.snapshot_slots)


def make_engine(
    team: Team | None, context: InferenceContext, controller: InferenceController, seed: int
) -> Engine | Fleet:
    """The engine of a world of one, or those of rank 0; see `Door` for the seed."""
    ends, words = ends_of(controller.tokenizer), partial(word_tokens, controller.tokenizer)
    most = context.plan.limits.most_drafts
    door = Door(controller.tokenize_prompt, controller.vocabulary, ends, seed, words, controller.grammars.matcher, most)
    drafter = controller.drafter
    proposals = None if drafter is None else Proposals(drafter, controller.vocabulary.has_tokens)
    if team is None:
        return Engine(make_scheduler(context.plan), StepExecutor(context, controller), door, proposals=proposals)
    plan, faults = context.plan, Faults("the engine")
    engines, schedulers = [], []
    for replica in range(team.replicas):
        scheduler = JournalledScheduler(plan.limits, plan.policy, plan.fingerprint, plan.snapshot_slots)
        is_own = replica == team.here.replica
        executor = team.executor(StepExecutor(context, controller)) if is_own else team.mirror(replica)
        schedulers.append(scheduler)
        engines.append(Engine(scheduler, executor, door, faults, proposals))
    return Fleet(engines, schedulers, team.link.send, team.heartbeat)


def make_follower(team: Team, context: InferenceContext, controller: InferenceController) -> Follower:
    """What takes part in the steps of its replica as rank 0 says."""
    executor = team.executor(StepExecutor(context, controller))
    return Follower(
        team.here.replica, team.link.receive, partial(make_scheduler, context.plan), executor, _PoolsOf(context)
    )


class _PoolsOf:
    """A context's pools, as a follower is told to have them."""

    def __init__(self, context: InferenceContext) -> None:
        self._context = context

    def allocate(self) -> None:
        self._context.allocate_all_tensors(is_init=False)

    def free(self) -> None:
        self._context.deallocate_all_tensors()
