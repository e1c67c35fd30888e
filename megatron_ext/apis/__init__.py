"""Megatron's high-level interface, the names of `megatron.core.inference.apis`, over the engine of this package.

    from megatron_ext.apis import MegatronLLM, SamplingParams

    with MegatronLLM(model=model, tokenizer=tokenizer, use_coordinator=False) as llm:
        (request,) = llm.generate("The import statement", SamplingParams(num_tokens_to_generate=20, top_k=1))

See docs/megatron_api.md.
"""

from megatron_ext.mcore.inference_request import DynamicInferenceRequest, DynamicInferenceRequestRecord  # isort: skip

from megatron.core.inference.sampling_params import SamplingParams

from megatron_ext.apis.http_frontend import ServeConfig
from megatron_ext.apis.llm import MegatronAsyncLLM, MegatronLLM

__all__ = [
    "DynamicInferenceRequest",
    "DynamicInferenceRequestRecord",
    "MegatronAsyncLLM",
    "MegatronLLM",
    "SamplingParams",
    "ServeConfig",
]
