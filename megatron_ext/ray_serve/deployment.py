"""Deployment of Ray Serve whose replicas each own an engine and serve OpenAI's routes.

A replica is an actor with the engine client in its process. It serves the application of `server/app.py`, so routes,
keys, limits, streams, errors and metrics are the same as with `megatron-ext serve`. Either Ray's proxy calls the
application, or an ingress does, which knows the tokens of a prompt before it is routed: Ray chooses the replica of an
HTTP request before its body is read.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import ray
from ray import get_runtime_context, serve
from ray.actor import ActorHandle
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayActorError, RayError
from ray.serve import Application
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from starlette.types import Message

from megatron_ext.errors import RankError
from megatron_ext.kv_events.mirror import Mirror
from megatron_ext.ray_serve.cache_log import CacheLog, CacheReport, LogPosition, ReplicaFacts
from megatron_ext.ray_serve.fleet_routes import ANSWERED_BY, Answers, FleetRoutes, WholeAnswer, whole_answer
from megatron_ext.ray_serve.forwarded import (
    ForwardedRequest,
    IngressApp,
    PromptRequest,
    ReadPrompt,
    ReplicaLostError,
    respond,
)
from megatron_ext.ray_serve.liveness import LOOKS, Liveness, watching
from megatron_ext.ray_serve.proxy import warn_if_absent
from megatron_ext.ray_serve.ranks import Ranks, joined_world, prepare_process
from megatron_ext.ray_serve.replica_hooks import ReplicaHooks
from megatron_ext.ray_serve.request_router import PrefixRequestRouter
from megatron_ext.ray_serve.settings import AppSettings
from megatron_ext.server.access import AccessLog
from megatron_ext.server.anthropic.error_envelope import AnthropicMiddleware
from megatron_ext.server.log import set_up_logging
from megatron_ext.server.openai.chat_prompt import AnswerMemory
from megatron_ext.server.openai.responses_api.response_store import tag_of

if TYPE_CHECKING:
    from fastapi import APIRouter, FastAPI
    from ray.serve._private.replica_result import ReplicaResult
    from starlette.types import ASGIApp

    from megatron_ext.config import ServerSettings

LONGEST_PROBLEM = 300  # characters
_PERIOD = 1.0  # seconds between an answer and the next call
logger = logging.getLogger(__name__)
LAST_WORDS = 1.0  # seconds for the errors of requests to reach Ray's proxies
LOADING_GRACE = 10.0  # seconds for loading to report the error of a rank that has ended
FAILED = 1  # exit code
NAME, REPLICAS = "megatron_ext", "megatron_ext_replicas"
WAIT_LOOP = 1.0  # seconds between two looks whether a replica that stops has requests left
LONGER = 10.0  # seconds that an ingress stops after the replicas, so that it passes their errors on


class FleetCalls:
    """Calls to all replicas, by Ray Serve's broadcasts.

    Tried with Ray 2.60.0. A broadcast's public result has one time limit for all replicas, and no names. So that a
    replica that hangs costs its own answer only, this uses one private name, `_fetch_replica_results_async`.

    Args:
        replicas: Handle of the replicas, whose method `answer_whole` is called.
    """

    def __init__(self, replicas: DeploymentHandle) -> None:
        self._replicas = replicas
        self._names: dict[str, str] = {}  # of replicas that have answered, by the id of their actor

    async def ask_all(self, request: ForwardedRequest, patience: float) -> Answers:
        """Return the answer of each replica that runs, or the reason why it has not answered.

        Args:
            request: Request that all of them get.
            patience: Seconds that each of them has.
        """
        broadcast = self._replicas.broadcast("answer_whole", request)
        try:
            results: list[ReplicaResult] = await broadcast._fetch_replica_results_async()
        except DeploymentUnavailableError:
            return {}
        answers = dict(await asyncio.gather(*(self._answer(one, patience) for one in results)))
        self._names = {actor: name for actor, name in self._names.items() if name in answers}
        return answers

    async def _answer(self, result: ReplicaResult, patience: float) -> tuple[str, WholeAnswer | str]:
        actor = (await result.to_object_ref_async()).task_id().actor_id().hex()
        name = self._names.get(actor, f"actor {actor}")
        try:
            answer: WholeAnswer = await asyncio.wait_for(result.get_async(), patience)
        except asyncio.TimeoutError:
            result.cancel()
            return name, f"no answer within {patience:g} s"
        except RayError as error:
            return name, " ".join(str(error).split())[:LONGEST_PROBLEM]
        self._names[actor] = answer.replica
        return answer.replica, answer


@dataclass
class _Caller:
    requests: list[asyncio.Event] = field(default_factory=list)
    watching: asyncio.Task[None] | None = None


class CallerWatch:
    """Ingresses with requests in flight; requests of a lost one have no reader, and end. Used in one event loop.

    Ray does not tell an actor that the caller of its method has ended, so each ingress is asked for a sign of life.
    """

    def __init__(self) -> None:
        self._callers: dict[ActorHandle, _Caller] = {}

    @contextlib.contextmanager
    def answering(self, caller: ActorHandle) -> Iterator[asyncio.Event]:
        """Watch a caller during a request; yield the event of its loss."""
        one = self._callers.setdefault(caller, _Caller())
        lost = asyncio.Event()
        one.requests.append(lost)
        if one.watching is None:
            one.watching = asyncio.create_task(self._watch(caller, one.requests))
        try:
            yield lost
        finally:
            one.requests.remove(lost)
            if not one.requests and one.watching is not None:
                one.watching.cancel()
                del self._callers[caller]

    async def _watch(self, caller: ActorHandle, requests: list[asyncio.Event]) -> None:
        with contextlib.suppress(ActorDiedError):
            while True:
                with contextlib.suppress(ActorUnavailableError):  # known to be dead, or available again, after a while
                    await caller.__ray_ready__.remote()
                await asyncio.sleep(_PERIOD)
        logger.warning("an ingress is lost; %d requests of it end", len(requests))
        for lost in requests:
            lost.set()


class Replica(ReplicaHooks):
    """Replica of one process, or the first rank of one.

    Args:
        words: Command line of `megatron-ext serve`.
        ranks: Number of ranks.
        timeout: Seconds without a sign of life after which a part of the replica is dead.

    Raises:
        ConfigError: The settings cannot be satisfied on this machine.
        RankError: A rank could not start.
    """

    def __init__(self, words: Sequence[str], ranks: int, timeout: float) -> None:
        self._liveness = Liveness(timeout)
        self._resources = contextlib.ExitStack()
        self._is_stopping = False
        self._loop: asyncio.AbstractEventLoop | None = None  # of the application, once it has started
        self._steps = 0
        self._ranks = Ranks(words, ranks) if ranks > 1 else None
        settings = prepare_process(words)
        if self._ranks is None:
            self._load_model(settings)
            return
        self._ranks.watch(self._lose_rank)
        with watching(self._ranks.alive, timeout, self._end_silent):
            self._load_model(settings)

    def _load_model(self, settings: ServerSettings) -> None:
        from megatron_ext.mcore import platform
        from megatron_ext.server.run import loaded_serving

        with contextlib.ExitStack() as resources:  # released if loading fails
            resources.callback(platform.shut_down)
            try:
                with joined_world(settings) as parallel_context:
                    self._serving = resources.enter_context(loaded_serving(settings, None, parallel_context))
            except RankError as error:
                self._is_stopping = True
                if str(error) or self._ranks is None:
                    raise
                raise RankError(self._ranks.error()) from None
            self._resources = resources.pop_all()
        self._serving.requests.on_lost_ranks = self._end_soon

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Return the application that Ray's proxy calls; its lifespan starts and stops the engine's thread."""
        return self._create_app()

    def _create_app(self, routers: Sequence[APIRouter] = (), admin_paths: frozenset[str] = frozenset()) -> FastAPI:
        from megatron_ext.server.app import create_app

        app = create_app(self._serving, routers=routers, admin_paths=admin_paths, answers_ids=False)
        started = app.router.lifespan_context

        @contextlib.asynccontextmanager
        async def lifespan(app: FastAPI) -> AsyncIterator[None]:
            async with started(app):
                self._loop = asyncio.get_running_loop()
                yield
                self._is_stopping = True  # the ranks end with the engine

        app.router.lifespan_context = lifespan
        return app

    def _lose_rank(self, message: str) -> None:
        """End this replica since one of its other ranks has ended; called in any thread."""
        if self._loop is None:  # loading may have no other way to see it
            threading.Timer(LOADING_GRACE, self._end_loading, (message,)).start()
        elif not self._is_stopping:
            self._loop.call_soon_threadsafe(self._fail, message)

    def _end_silent(self, parts: Sequence[str]) -> None:
        """End this process: a rank does not answer while loading waits for it."""
        logger.error("this replica ends while it is loaded: no sign of life of %s", ", ".join(parts))
        os._exit(FAILED)

    def _end_loading(self, message: str) -> None:
        """End this process if loading neither failed by itself nor was complete before the rank ended."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._fail, message)
        elif not self._is_stopping:
            logger.error("this replica ends while it is loaded: %s", message)
            os._exit(FAILED)

    def _fail(self, message: str) -> None:
        """End all requests with an error, and then this process: Ray replaces it, with all its ranks."""
        if not self._is_stopping:
            self._serving.requests.note_lost_ranks(RankError(message))

    def _end_soon(self) -> None:
        """End this process when its requests have sent their errors."""
        self._is_stopping = True
        logger.error("this replica ends: %s", self._serving.requests.lost_ranks)
        threading.Timer(LAST_WORDS, os._exit, (FAILED,)).start()

    def check_health(self) -> None:
        """Raise while steps fail: Ray then replaces this replica; end it if its engine or a rank does not answer.

        Raises:
            RuntimeError: The replica is not healthy.
        """
        requests, state = self._serving.requests, self._serving.metrics.state
        if not requests.is_healthy:
            raise RuntimeError(f"steps fail; errors so far: {requests.error_count}")
        steps = 0 if state is None else state.steps
        is_idle = requests.is_asleep or requests.is_paused or not requests.living
        self._liveness.look("the engine", is_alive=is_idle or steps != self._steps)
        self._steps = steps
        for rank, is_alive in ({} if self._ranks is None else self._ranks.alive()).items():
            self._liveness.look(rank, is_alive=is_alive)
        if silent := self._liveness.silent():
            self._fail(f"no sign of life of {', '.join(silent)}")

    def __del__(self) -> None:
        """Free the model; the application's lifespan has ended."""
        self._free()

    def _free(self) -> None:
        if hasattr(self, "_resources"):
            self._resources.close()


class RoutedReplica(Replica):
    """Replica behind an ingress and its router.

    See `Replica` for arguments and errors.
    """

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self, words: Sequence[str], ranks: int, timeout: float
    ) -> None:
        from megatron_ext.ray_serve.replica_status import ADMIN_PATHS, status_router

        super().__init__(words, ranks, timeout)
        self._callers = CallerWatch()
        engine = self._serving.engine
        size = engine.limits.block_size
        self._logs = [CacheLog(Mirror(size, has_states=engine.is_hybrid)) for _ in range(engine.replicas)]
        engine.observe_caches([one.changes for one in self._logs])
        self._name = serve.get_replica_context().replica_id.unique_id
        status = status_router(self._name, ray.util.get_node_ip_address())
        self._app = self._create_app((status,), ADMIN_PATHS)
        self._lifespan = self._app.router.lifespan_context(self._app)
        await self._lifespan.__aenter__()

    async def answer(self, request: ForwardedRequest, ingress: ActorHandle) -> AsyncIterator[Message]:
        """Answer a request that an ingress forwards, as ASGI messages."""
        with self._callers.answering(ingress) as lost:
            async with contextlib.aclosing(respond(self._app, request, lost)) as messages:
                async for message in messages:
                    yield {**message, ANSWERED_BY: self._name} if message["type"] == "http.response.start" else message

    async def answer_whole(self, request: ForwardedRequest) -> WholeAnswer:
        """Answer a request that every replica gets."""
        return await whole_answer(self._app, request, self._name)

    async def read_prompt(self, request: PromptRequest) -> ReadPrompt:
        """Tokenize the prompts of a request; see `read_prompt`."""
        from megatron_ext.ray_serve.prompts import read_prompt

        return await read_prompt(self._serving, request)

    def record_replica_metadata(self) -> dict[str, object]:
        """Return what routers learn of a replica once it is ready; see `ReplicaFacts`."""
        geometry = self._serving.engine.geometry
        return ReplicaFacts(
            geometry.block_size_tokens,
            geometry.blocks,
            has_states=geometry.state_bytes > 0,
            caches=len(self._logs),
            tag=tag_of(self._serving.instance),
        ).to_dict()

    async def cache_report(self, position: LogPosition, patience: float, cache: int = 0) -> CacheReport:
        """Return the events of one of the caches from a position on; see `CacheLog.wait`."""
        return await self._logs[cache].wait(position, patience)

    def _end_soon(self) -> None:
        """End this process at once: the ingress sends the errors, or requests that had not begun to other replicas."""
        logger.error("this replica ends: %s", self._serving.requests.lost_ranks)
        os._exit(FAILED)

    async def __del__(self) -> None:  # type: ignore[override]  # Ray awaits it
        """Stop the engine's thread, and free the model."""
        if hasattr(self, "_lifespan"):
            await self._lifespan.__aexit__(None, None, None)
        self._free()


class Ingress:
    """Ingress that has prompts tokenized once, and forwards requests to replicas behind a router.

    Args:
        replicas: Handle of the replicas.
        max_body_bytes: Maximum size of a body.
        answers_bytes: Maximum size of the remembered answers of all replicas.
        log_level: See `set_up_logging`.
        access_log: Whether each request is logged.
    """

    def __init__(
        self, replicas: DeploymentHandle, max_body_bytes: int, answers_bytes: int, log_level: str, access_log: bool
    ) -> None:
        self._replicas, self._answers = replicas, AnswerMemory(answers_bytes)
        self._limit, self._logs = max_body_bytes, access_log
        set_up_logging(log_level)
        warn_if_absent()
        self._actor = get_runtime_context().current_actor

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Return the application that Ray's proxy calls."""
        app: ASGIApp = IngressApp(self._read, self._forward, self._limit, self._answers)
        app = AnthropicMiddleware(FleetRoutes(app, FleetCalls(self._replicas).ask_all, self._limit))
        return AccessLog(app, answers=False, logs=self._logs)  # Ray's proxy answers ids

    async def _read(self, request: PromptRequest) -> ReadPrompt:
        with _naming_lost_replicas():
            prompt: ReadPrompt = await self._replicas.read_prompt.remote(request)
        return prompt

    async def _forward(self, request: ForwardedRequest) -> AsyncIterator[Message]:
        answer = self._replicas.options(stream=True).answer.remote(request, self._actor)
        is_ended = False
        try:
            with _naming_lost_replicas():
                async for message in answer:
                    if message.get("body"):
                        request.first_token.note()
                    yield message
            is_ended = True
        finally:
            if not is_ended:
                answer.cancel()


@contextlib.contextmanager
def _naming_lost_replicas() -> Iterator[None]:
    try:
        yield
    except RayActorError as error:
        raise ReplicaLostError(" ".join(str(error).split())) from None


def deploy(settings: AppSettings) -> Application:
    """Return the application of settings."""
    wanted, server = settings.deployment, settings.server.server
    timeout = server.shutdown_timeout
    options = {
        **wanted.scaling_options,
        "max_ongoing_requests": wanted.max_ongoing_requests,
        "ray_actor_options": wanted.actor_options,
        "graceful_shutdown_timeout_s": timeout,
        "graceful_shutdown_wait_loop_s": WAIT_LOOP,
        # Ray replaces a replica after three checks in a row that failed or had no answer.
        "health_check_period_s": wanted.replica_timeout / LOOKS,
        "health_check_timeout_s": wanted.replica_timeout / 3,
    }
    if settings.ranks > 1:
        options["placement_group_bundles"] = [wanted.bundle] * settings.ranks
        options["placement_group_strategy"] = wanted.placement_group_strategy
    arguments = list(settings.words), settings.ranks, wanted.replica_timeout
    if not settings.routes_by_prefix:
        return serve.deployment(name=NAME, **options)(serve.ingress()(Replica)).bind(*arguments)
    routing = {"policy": wanted.routing_policy, "alpha": wanted.routing_alpha}
    config = RequestRouterConfig(request_router_class=PrefixRequestRouter, request_router_kwargs=routing)
    replicas = serve.deployment(name=REPLICAS, request_router_config=config, **options)(RoutedReplica)
    ingress = serve.deployment(
        name=NAME,
        num_replicas=wanted.num_ingress_replicas,
        max_ongoing_requests=wanted.max_ongoing_requests * wanted.most,
        ray_actor_options={"num_cpus": 0},
        max_surge_percent=100,
        graceful_shutdown_timeout_s=timeout + LONGER,
        graceful_shutdown_wait_loop_s=WAIT_LOOP,
    )(serve.ingress()(Ingress))
    limits = server.limits
    settings_here = limits.body_bytes, limits.answers_bytes, server.log_level, server.access_log
    return ingress.bind(replicas.bind(*arguments), *settings_here)
