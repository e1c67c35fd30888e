"""Megatron-LM's own inference scripts run to their ends, unchanged, with the stand-in of `megatron.training`.

The environment variable `MEGATRON_LM` names a checkout of the version of megatron-core that is found, 0.16 or 0.19;
without it this module is not collected (see conftest.py).
"""

from __future__ import annotations

import json
import os
from asyncio import to_thread
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue

import httpx
import pytest
import torch

from megatron_ext.apis import MegatronAsyncLLM, ServeConfig
from megatron_ext.commands import run
from megatron_ext.mcore.upstream_version import found_version
from megatron_ext.megatron_lm.run import main
from tests.unit_tests.megatron_lm import main_scripts
from tests.unit_tests.megatron_lm.conftest import PROMPTS
from tests.unit_tests.support import megatron_models
from tests.unit_tests.support.holding import PATIENCE

ROOT = Path(os.environ["MEGATRON_LM"])
IS_NEW = found_version() >= (0, 17)
BY_HAND, ALL_AT_ONCE = ("--incoming-requests-per-step", "1"), ("--incoming-requests-per-sec", "-1")
SCRIPTS = {
    "examples/inference/gpt/gpt_dynamic_inference.py": BY_HAND,
    "examples/inference/advanced/gpt_dynamic_inference.py": BY_HAND,
    "examples/inference/offline_inference.py": ALL_AT_ONCE,
}
SERVER = "examples/inference/launch_inference_server.py"
FOUND = [name for name in SCRIPTS if (ROOT / name).exists()]
COMMON = "--num-tokens-to-generate 8 --top_k 1 --return-log-probs --prompts".split()


def tool_results(checkpoint: Path, output: Path) -> dict:
    """Results of this package's own tool on the same weights."""
    prompts = output.with_suffix(".jsonl")
    prompts.write_text("".join(json.dumps({"text": prompt}) + "\n" for prompt in PROMPTS), "utf-8")
    flags = "--use-checkpoint-args --tokenizer-type NullTokenizer --vocab-size 56 --termination-id 55 --top_k 1"
    flags += " --num-tokens-to-generate 8 --return-log-probs --inference-dynamic-batching-buffer-size-gb 0.01"
    files = ["--load", str(checkpoint), "--prompt-file", str(prompts), "--output-path", str(output)]
    assert run.main([*files, *flags.split()]) == run.DONE
    return json.loads(output.read_text("utf-8"))


def test_there_is_a_script_to_play():
    assert FOUND


@pytest.mark.skipif(found_version() < (0, 20), reason="the file says what main has")
def test_the_data_file_of_mains_scripts():
    known = main_scripts.read()
    assert main_scripts.used_by(ROOT) == {name: known[name] for name in known if name not in ("version", "commit")}


@pytest.mark.skipif(not (ROOT / SERVER).exists(), reason="this version has no such script")
@pytest.mark.parametrize("kind", ["llama", "hybrid"])
def test_the_server_answers_as_our_tool(checkout, checkpoints, tmp_path, monkeypatch, kind):
    started: Queue[MegatronAsyncLLM] = Queue()

    async def serve(self: MegatronAsyncLLM, config: ServeConfig, **options: bool) -> None:
        await to_thread(self._serve, config)
        started.put(self)
        await self.wait_for_shutdown()

    monkeypatch.setattr(MegatronAsyncLLM, "serve", serve)
    flags = ["--load", str(checkpoints(kind)), "--vocab-size", "56", "--host", "127.0.0.1", "--port", "0"]
    flags += ["--model-provider", {"llama": "gpt", "hybrid": "mamba"}[kind]]
    expected = tool_results(checkpoints(kind), tmp_path / "tool.json")
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: None)  # the script's last call
    with megatron_models.stand_ins(), ThreadPoolExecutor(1) as pool:
        ended = pool.submit(main, [str(ROOT / SERVER), *flags])
        ended.add_done_callback(lambda _: started.put(None))
        llm = started.get(timeout=PATIENCE)
        if llm is not None:
            body = {"prompt": [int(token) for token in PROMPTS[0].split()], "max_tokens": 8, "temperature": 0}
            answer = httpx.post(f"{llm._runtime._frontend.url}/v1/completions", json=body, timeout=PATIENCE).json()
            llm._runtime.close()
        assert ended.result(PATIENCE) == 0
    assert answer["choices"][0]["text"].split() == [str(one) for one in expected["0"]["generated_tokens"]]


@pytest.mark.parametrize("kind", ["llama", "hybrid"])
@pytest.mark.parametrize("script", FOUND)
def test_tokens_and_log_probs_are_those_of_our_tool(checkout, checkpoints, tmp_path, script, kind):
    output = tmp_path / "results.json"
    flags = ["--load", str(checkpoints(kind)), "--output-path", str(output), "--vocab-size", "56" if IS_NEW else "55"]
    flags += ["--model-provider", {"llama": "gpt", "hybrid": "mamba"}[kind], *SCRIPTS[script], *COMMON, *PROMPTS]
    with megatron_models.stand_ins():
        assert main([str(ROOT / script), *flags]) == 0
    results, expected = json.loads(output.read_text("utf-8")), tool_results(checkpoints(kind), tmp_path / "tool.json")
    for index in map(str, range(len(PROMPTS))):
        assert results[index]["generated_tokens"] == expected[index]["generated_tokens"]
        close = pytest.approx(expected[index]["logprobs"], abs=megatron_models.ATOL)
        assert results[index]["logprobs"] == close
        assert results[index]["input_prompt"] == PROMPTS[int(index)]
