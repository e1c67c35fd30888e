"""Lifecycle of MegatronLLM and MegatronAsyncLLM: states, misuse, counts, the HTTP server, construction that fails."""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from megatron_ext import LoadedEngine, attach_engine
from megatron_ext.apis import MegatronLLM, SamplingParams, ServeConfig, http_frontend
from megatron_ext.errors import EngineClosed, EngineSuspended
from tests.unit_tests.apis.conftest import SMALL, Config, tokenizer
from tests.unit_tests.support.holding import PATIENCE
from tests.unit_tests.support.megatron_models import PROMPT

GREEDY = SamplingParams(top_k=1, num_tokens_to_generate=6)
SETTINGS = {"block_size": 16, "block_count": 64, "max_requests": 8}
LIFECYCLE = ("pause", "unpause", "suspend", "resume")


def pools(llm: MegatronLLM) -> object:
    """Pools of the engine; None while they are freed."""
    return llm._runtime._loaded.inference_engine.context.pools


class TestDirectMode:
    @pytest.mark.parametrize("name", LIFECYCLE)
    def test_has_no_lifecycle(self, start, name):
        with pytest.raises(RuntimeError, match="use_coordinator=True"):
            getattr(start(), name)()

    def test_with_experts_over_ranks_is_refused(self, model, monkeypatch):
        from megatron.core import parallel_state

        monkeypatch.setattr(parallel_state, "get_expert_model_parallel_world_size", lambda: 2)
        with pytest.raises(ValueError, match="expert_model_parallel_size 2 needs use_coordinator=True"):
            MegatronLLM(model=model, tokenizer=tokenizer(), use_coordinator=False)


class TestStates:
    def test_a_paused_engine_computes_nothing(self, start):
        llm = start(use_coordinator=True)
        llm.pause()
        llm.pause()
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(llm.generate, PROMPT, GREEDY)
            while not llm._runtime._loaded.statistics().waiting:
                pass
            assert (llm.context.step_count, pools(llm) is not None) == (0, True)
            llm.unpause()
            assert len(waiting.result()[0].generated_tokens) == 6
        llm.unpause()

    def test_a_suspended_engine_has_no_memory(self, start):
        llm = start(use_coordinator=True)
        before = llm.generate(PROMPT, GREEDY)[0].generated_tokens
        llm.pause()
        llm.suspend()
        llm.suspend()
        assert pools(llm) is None
        with pytest.raises(EngineSuspended, match="resume"):
            llm.generate(PROMPT, GREEDY)
        with pytest.raises(RuntimeError, match=r"call resume\(\) before unpause"):
            llm.unpause()
        llm.resume()
        assert pools(llm) is not None
        llm.unpause()
        assert llm.generate(PROMPT, GREEDY)[0].generated_tokens == before

    @pytest.mark.parametrize(("mode", "is_freed"), [("persist", False), ("offload", True)])
    def test_a_suspended_engine_that_keeps_its_cache(self, start, mode, is_freed):
        llm = start(use_coordinator=True, kv_cache_management_mode=mode, static_kv_memory_pointers=is_freed)
        llm.generate(PROMPT, GREEDY)
        llm.pause()
        llm.suspend()
        assert (pools(llm).kv.untyped_storage().nbytes() == 0) is is_freed
        llm.resume()
        llm.unpause()
        assert llm.generate(PROMPT, GREEDY)[0].num_cached_tokens == 32

    def test_a_running_engine_is_not_suspended(self, start):
        with pytest.raises(RuntimeError, match=r"call pause\(\) before suspend"):
            start(use_coordinator=True).suspend()


class TestCoroutines:
    """`submit` and `run_sync`: an event loop beside the engine."""

    def test_they_run_in_one_loop(self, start_async):
        """Requests of several coroutines are served together."""

        async def serve(tokens: list[int]) -> tuple[object, list[int]]:
            request = await llm.generate(tokens, GREEDY)
            return asyncio.get_running_loop(), request.generated_tokens

        async def use() -> None:
            loop, tokens = llm.run_sync(serve(PROMPT))
            assert loop is not asyncio.get_running_loop()
            assert await asyncio.wrap_future(llm.submit(serve(PROMPT))) == (loop, tokens)
            await llm.shutdown()

        llm = start_async()
        asyncio.run(use())

    def test_a_shutdown_cancels_them(self, start):
        threads, llm = set(threading.enumerate()), start(use_coordinator=True)
        waiting = llm.submit(asyncio.Event().wait())
        llm.shutdown()
        assert waiting.cancelled()
        assert set(threading.enumerate()) <= threads
        with pytest.raises(EngineClosed):
            llm.submit(asyncio.sleep(0))


class TestShutdown:
    @pytest.mark.parametrize("use_coordinator", [False, True])
    def test_is_idempotent_and_frees_everything(self, start, use_coordinator):
        threads = set(threading.enumerate())
        llm = start(use_coordinator=use_coordinator)
        llm.generate(PROMPT, GREEDY)
        llm.shutdown()
        llm.shutdown()
        llm.wait_for_shutdown()
        assert pools(llm) is None
        assert set(threading.enumerate()) <= threads
        assert llm.context.step_count == 6
        with pytest.raises(EngineClosed):
            llm.generate(PROMPT, GREEDY)

    def test_a_collected_object_is_shut_down(self, model):
        gc.freeze()  # a search among all objects of the process takes half a second
        llm = MegatronLLM(model=model, tokenizer=tokenizer(), inference_config=Config(**SMALL))
        runtime = llm._runtime
        del llm
        gc.collect()
        gc.unfreeze()
        assert runtime.ended.done()

    def test_waiting_can_be_cancelled(self, start_async):
        async def wait() -> None:
            async with start_async() as llm:
                task = asyncio.create_task(llm.wait_for_shutdown())
                await asyncio.sleep(0)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                assert (await llm.generate(PROMPT, GREEDY)).succeeded()
            await llm.wait_for_shutdown()

        asyncio.run(wait())


class TestConstruction:
    def test_that_fails_leaves_nothing(self, start, model, monkeypatch):
        threads, made = set(threading.enumerate()), []

        def attach(*arguments: object, **_: object) -> LoadedEngine:
            made.append(attach_engine(*arguments, **SETTINGS))
            return made[0]

        with monkeypatch.context() as patch:
            patch.setattr("megatron_ext.attach_engine", attach)
            patch.setattr("megatron_ext.apis.runtime.EngineView", None)
            with pytest.raises(TypeError):
                MegatronLLM(model=model, tokenizer=tokenizer())
        with pytest.raises(EngineClosed):
            made[0].statistics()
        assert set(threading.enumerate()) <= threads
        assert start().generate(PROMPT, GREEDY)[0].succeeded(), "the model is free"


class TestCounts:
    def test_reset_begins_anew(self, start):
        llm = start()
        assert (llm.context.step_count, llm.engine.context.lifetime_prefill_token_count) == (0, 0)
        for _ in range(2):
            (request,) = llm.generate(PROMPT, GREEDY)
            assert request.num_cached_tokens == 0
            assert llm.engine.context.step_count == llm.engine.step_count == 6
            assert llm.context.lifetime_prefill_token_count == len(PROMPT)
            assert (llm.context.async_sched_step_count, llm.context.async_sched_compaction_step_count) == (0, 0)
            llm.engine.reset()


class TestServer:
    @pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.5", "::1", "localhost", "0.0.0.0", "10.1.2.3"])
    def test_only_an_address_that_others_reach_admits_any_host_name(self, host):
        is_reached = host in ("0.0.0.0", "10.1.2.3")
        assert ServeConfig(host=host).server_config().allowed_hosts == (("*",) if is_reached else ())

    def body(self) -> dict:
        return {"prompt": PROMPT, "max_tokens": 6, "temperature": 0}

    def test_beside_generate(self, start_async):
        async def ask() -> tuple[list[int], str, str]:
            async with start_async() as llm:
                await llm.serve(ServeConfig(host="127.0.0.7", port=0), blocking=False)  # no other process is there
                url = llm._runtime._frontend.url
                async with httpx.AsyncClient(timeout=PATIENCE) as client:
                    asked = [client.post(f"{url}/v1/completions", json=self.body()) for _ in range(2)]
                    one, *found = await asyncio.gather(llm.generate(PROMPT, GREEDY), *asked)
                with pytest.raises(RuntimeError, match="runs already"):
                    await llm.serve(ServeConfig(host="127.0.0.1", port=0), blocking=False)
            with pytest.raises(httpx.ConnectError):
                httpx.get(f"{url}/health")
            return one.generated_text, *(one.json()["choices"][0]["text"] for one in found)

        one, *served = asyncio.run(ask())
        assert served == [one, one]

    def test_blocking_until_shutdown(self, start, monkeypatch):
        llm, listening = start(use_coordinator=True), threading.Event()
        monkeypatch.setattr(http_frontend, "announce", lambda _: listening.set())
        with socket.socket() as sock, ThreadPoolExecutor(1) as pool:
            sock.bind(("127.0.0.1", 0))
            url = f"http://127.0.0.1:{sock.getsockname()[1]}"
            serving = pool.submit(llm.serve, ServeConfig(sock=sock))
            assert listening.wait(PATIENCE)
            assert httpx.get(f"{url}/v1/models", timeout=PATIENCE).status_code == 200
            assert not serving.done()
            llm.shutdown()
            serving.result()
