"""vLLM among its peers, run by its own Python.

Its scan for CPUs leaves no states inside a prefill, whatever the settings; so its scheduler is told to cut prefills
where states are kept, as it does for other such layers.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from benchmarks.cases import Run
from benchmarks.peers.sizes import Size
from benchmarks.peers.work import PRELOADED, StandardRows, standard

LONGEST, REQUESTS, STEP_TOKENS = 9_000, 16, 2_048
SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "4",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
}


class Vllm:
    """Engine of vLLM, with prefix caching. See `benchmarks.peers.work.Peer`."""

    def __init__(self, model: str) -> None:
        from vllm import LLM
        from vllm.model_executor.layers.mamba.abstract import MambaBase
        from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

        MambaMixer2.get_kv_cache_spec = MambaBase.get_kv_cache_spec
        self._llm = LLM(
            model=model,
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=True,
            max_model_len=LONGEST,
            max_num_seqs=REQUESTS,
            max_num_batched_tokens=STEP_TOKENS,
            enable_prefix_caching=True,
        )
        self._seen: dict[str, int] = {}
        self._keys: dict[str, int] = {}
        self._count = 0

    def forget(self, shared: int = 0, *, continues: bool = False) -> None:
        """Empty the cache."""
        self._llm.reset_prefix_cache()

    def submit(self, key: int, prompt: list[int], count: int) -> None:
        """Queue a request."""
        from vllm import SamplingParams, TokensPrompt

        self._count += 1
        name = str(self._count)
        self._keys[name], self._seen[name] = key, 0
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
        self._llm.llm_engine.add_request(name, TokensPrompt(prompt_token_ids=prompt), params)

    def step(self) -> Iterator[tuple[int, list[int], int, bool]]:
        """Take a step."""
        for output in self._llm.llm_engine.step():
            name, tokens = output.request_id, list(output.outputs[0].token_ids)
            new, self._seen[name] = tokens[self._seen[name] :], len(tokens)
            yield self._keys[name], new, output.num_cached_tokens or 0, output.finished


@standard(interpreter="VLLM_PYTHON", preloads="VLLM_PRELOAD")
def vllm(run: Run, model: str, size: Size) -> None:
    """Standard rows, served by vLLM; needs VLLM_PYTHON, and starts with the libraries of VLLM_PRELOAD."""
    os.environ.update(SETTINGS)
    libraries = [Path(one) for one in os.environ.get("LD_PRELOAD", "").split(":") if one]
    mapped = Path("/proc/self/maps").read_text("utf-8")
    missing = [str(one) for one in libraries if str(one.resolve()) not in mapped]
    if missing:  # the loader only warns
        raise ValueError(f"VLLM_PRELOAD: {', '.join(missing)} cannot be loaded; name files, with ':' between them")
    if libraries:
        run.row(PRELOADED, {PRELOADED: ", ".join(one.name for one in libraries)})
    import torch
    import vllm as package

    peer = Vllm(model)
    run.remark(f"vLLM {package.__version__}, torch {torch.__version__}, {torch.get_num_threads()} threads, fp32, eager")
    StandardRows(run, peer, size).measure()
