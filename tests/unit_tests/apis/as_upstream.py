"""One program with megatron-core's class and with ours, and the signatures of both; run with 0.19.2 on the path.

    python -m tools.bases 0.19.2 python -m tests.unit_tests.apis.as_upstream

prints a JSON object: `results` of the program by the module that it imports, `signatures` by module, class and method.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import warnings

from tests.unit_tests.support import upstream_engine

UPSTREAM, OURS = MODULES = ("megatron.core.inference.apis", "megatron_ext.apis")
PROGRAM = """
from {module} import MegatronLLM, SamplingParams

from megatron.core.inference.config import InferenceConfig

config = InferenceConfig(
    block_size_tokens=16, buffer_size_gb=0.05, max_requests=8, max_tokens=256, max_sequence_length=64,
    materialize_only_last_token_logits=False,
)
results, errors = [], []


def params(**fields):
    return SamplingParams(top_k=1, num_tokens_to_generate=8, **fields)


def refused(name):
    try:
        getattr(llm, name)()
    except Exception as error:
        errors.append([name, type(error).__name__])


with MegatronLLM(model=model, tokenizer=tokenizer, inference_config=config, use_coordinator=False) as llm:
    results += llm.generate("<5><6><7>", params())
    results += llm.generate([1, 2, 3, 4, 5], params(return_log_probs=True, top_n_logprobs=2))
    results += llm.generate(["<5><6><7>", "<9><9><9><9>"], params())
    assert llm.generate([]) == []
    first = results[0].generated_tokens
    stop = tokenizer.detokenize(first[3:5])
    results += llm.generate("<5><6><7>", params(stop_words=[stop]))
    results += llm.generate("<5><6><7>", params(stop_words=[stop], detokenize_stop_sequence=True))
    results += llm.generate("<5><6><7>", params(termination_id=first[5]))
    results += llm.generate([PROMPT], SamplingParams(top_k=1, num_tokens_total=50))
    results += llm.generate([PROMPT], SamplingParams(top_k=1, num_tokens_to_generate=500))
    for name in ("pause", "unpause", "suspend", "resume", "shutdown", "wait_for_shutdown"):
        refused(name)
    limits = [llm.is_primary_rank, llm.context.max_tokens, llm.context.max_requests, llm.engine.context is llm.context]
"""
FIELDS = ("prompt", "generated_text", "generated_tokens", "generated_length", "prompt_log_probs", "generated_log_probs")
TOP_N = ("prompt_top_n_logprobs", "generated_top_n_logprobs")


def shown(request: object) -> dict[str, object]:
    """Everything of a request that two runs share, and the type of each field."""
    values = {name: getattr(request, name) for name in (*FIELDS, *TOP_N)}
    values |= {"status": request.status.name, "prompt_tokens": request.prompt_tokens.tolist()}
    values |= {"params": dataclasses.asdict(request.sampling_params), "text": str(request).partition(",")[2]}
    values["types"] = {name: type(value).__name__ for name, value in sorted(vars(request).items())}
    values["fields"] = sorted(one.name for one in dataclasses.fields(request))
    return values


def run(module: str, names: dict[str, object]) -> dict[str, object]:
    scope = dict(names)
    exec(PROGRAM.replace("{module}", module), scope)
    return {"requests": [shown(one) for one in scope["results"]], "errors": scope["errors"], "limits": scope["limits"]}


def signatures(module: str) -> dict[str, dict[str, object]]:
    """Parameters of every public method, with kinds and defaults, and whether it is a coroutine function."""
    found = {}
    for name in ("MegatronLLM", "MegatronAsyncLLM", "ServeConfig"):
        cls = getattr(importlib.import_module(module), name)
        methods = {"__init__": cls.__init__} | {
            key: getattr(cls, key)
            for key in dir(cls)
            if not key.startswith("_") or key in ("__enter__", "__exit__", "__aenter__", "__aexit__")
        }
        found[name] = {key: described(one) for key, one in methods.items() if callable(one)}
        found[name] |= {
            key: "property"
            for key in dir(cls)
            if not key.startswith("_") and isinstance(inspect.getattr_static(cls, key), property)
        }
    found["names"] = sorted(importlib.import_module(module).__all__)
    return found


def described(function: object) -> list[object]:
    parameters = [
        [one.name, one.kind.name, "factory" if "factory" in str(one.default) else str(one.default)]
        for one in inspect.signature(function).parameters.values()
    ]
    return [inspect.iscoroutinefunction(function), *parameters]


def main() -> None:
    warnings.simplefilter("ignore")
    upstream_engine.install()

    from tests.unit_tests.support.megatron_models import PROMPT, VOCABULARY, build
    from tests.unit_tests.support.tokenizers import PieceTokenizer

    names = {"model": build("llama"), "tokenizer": PieceTokenizer(VOCABULARY), "PROMPT": PROMPT}
    found = {
        "results": {module: run(module, names) for module in MODULES},
        "signatures": {module: signatures(module) for module in MODULES},
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
