"""vLLM. Run by its own Python; see `benchmarks.peers.work`.

Its scan for CPUs leaves no states inside a prefill, whatever it is asked; so its scheduler is told to cut prefills
where states are kept, as it does for layers that cannot.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from benchmarks.peers.work import arguments, run

LONGEST, REQUESTS, STEP_TOKENS = 9_000, 8, 2_048
SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
}


class Vllm:
    """Engine of vLLM, with prefix caching."""

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

    def forget(self) -> None:
        """See `Peer`."""
        self._llm.reset_prefix_cache()

    def submit(self, key: int, prompt: list[int], count: int) -> None:
        """See `Peer`."""
        from vllm import SamplingParams, TokensPrompt

        self._count += 1
        name = str(self._count)
        self._keys[name], self._seen[name] = key, 0
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
        self._llm.llm_engine.add_request(name, TokensPrompt(prompt_token_ids=prompt), params)

    def step(self) -> Iterator[tuple[int, list[int], int, bool]]:
        """See `Peer`."""
        for output in self._llm.llm_engine.step():
            name, tokens = output.request_id, list(output.outputs[0].token_ids)
            new, self._seen[name] = tokens[self._seen[name] :], len(tokens)
            yield self._keys[name], new, output.num_cached_tokens or 0, output.finished


if __name__ == "__main__":
    options = arguments()
    os.environ.update(SETTINGS, OMP_NUM_THREADS=str(options.threads))
    import torch
    import vllm

    peer = Vllm(options.model)
    torch.set_num_threads(options.threads)
    run(peer, options, peer="vllm", version=vllm.__version__, torch=torch.__version__)
