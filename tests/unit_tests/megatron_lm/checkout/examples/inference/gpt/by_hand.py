"""Script of our own that uses Megatron's names as gpt_dynamic_inference.py does: parts by hand, steps in a loop."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from examples.inference.requests import add_script_args, write
from gpt_builders import gpt_builder
from mamba_builders import mamba_builder
from megatron.core.inference.contexts.dynamic_context import DynamicInferenceContext
from megatron.core.inference.engines import DynamicInferenceEngine, EngineSuspendedError
from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import GPTInferenceWrapper
from megatron.core.inference.sampling_params import SamplingParams
from megatron.core.inference.text_generation_controllers.text_generation_controller import TextGenerationController
from megatron.core.tokenizers import MegatronTokenizer
from megatron.training import get_args, get_model, initialize_megatron
from megatron.training.checkpointing import load_checkpoint
from model_provider import model_provider


def made_context(args: Any, model: Any) -> DynamicInferenceContext:
    """Construct the context by the keywords of 0.16.1, or by an `InferenceConfig` where there is one, as in 0.19."""
    if args.with_inference_config:
        from megatron.training.argument_utils import inference_cfg_from_args

        config = inference_cfg_from_args(args).to_inference_config(model, metrics_writer=None)
        return DynamicInferenceContext(model.config, config)
    return DynamicInferenceContext(
        params_dtype=args.params_dtype,
        num_layers=args.num_layers,
        kv_channels=args.kv_channels,
        num_attention_heads=args.num_query_groups,
        max_sequence_length=64,
        num_cuda_graphs=None,
        block_size_tokens=args.inference_dynamic_batching_block_size,
        buffer_size_gb=args.inference_dynamic_batching_buffer_size_gb,
        max_requests=args.inference_dynamic_batching_max_requests,
        max_tokens=args.inference_dynamic_batching_max_tokens,
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        materialize_only_last_token_logits=False,
        mamba_inference_state_config=None,
        cache_mla_latent=False,
        kv_lora_rank=None,
        qk_pos_emb_head_dim=64,
        use_cuda_graphs_for_non_decode_steps=True,
        use_flashinfer_fused_rope=False,
        unified_memory_level=0,
        cuda_graph_max_tokens=None,
        cuda_graph_mixed_prefill_count=16,
        metrics_writer=None,
        offload_kv_cache=False,
    )


def made_engine(args: Any, model: Any, context: DynamicInferenceContext) -> DynamicInferenceEngine:
    tokenizer = MegatronTokenizer.from_pretrained(
        metadata_path={"library": args.null_library}, vocab_size=args.vocab_size
    )
    if args.with_inference_config:
        controller = TextGenerationController(
            inference_wrapped_model=GPTInferenceWrapper(model, context), tokenizer=tokenizer
        )
        return DynamicInferenceEngine(controller=controller, context=context)
    controller = TextGenerationController(GPTInferenceWrapper(model, args, context), tokenizer)
    return DynamicInferenceEngine(
        controller,
        context,
        enable_cuda_graph=False,
        random_seed=args.seed,
        track_paused_request_events=False,
        enable_chunked_prefill=True,
        inference_logging_step_interval=0,
    )


def run(args: Any, engine: DynamicInferenceEngine) -> tuple[list[Any], list[bool]]:
    """One more prompt a step; suspended and resumed once."""
    params = SamplingParams(
        top_k=1,
        num_tokens_to_generate=args.num_tokens_to_generate,
        termination_id=args.termination_id,
        return_log_probs=True,
        skip_prompt_log_probs=args.skip_prompt_log_probs,
        top_n_logprobs=2,
    )
    records: list[Any] = []
    decode_only: list[bool] = []
    added = 0
    while added < len(args.prompts) or engine.has_unfinished_requests():
        if added < len(args.prompts):
            engine.add_request(added, args.prompts[added], params)
            added += 1
        try:
            result = engine.step_modern()
        except EngineSuspendedError:
            engine.resume()
            continue
        decode_only.append(engine.is_decode_only)
        records += [record.merge() for record in result["finished_request_records"]]
        if len(decode_only) == args.suspend_after:
            engine.suspend()
    return sorted(records, key=lambda record: record.request_id), decode_only


@torch.inference_mode()
def main() -> None:
    initialize_megatron(extra_args_provider=add_own_args)
    args = get_args()
    models = get_model(
        partial(model_provider, mamba_builder if args.model_provider == "mamba" else gpt_builder), wrap_with_ddp=False
    )
    load_checkpoint(models, None, None)
    model = models[0].eval()
    context = made_context(args, model)
    planned = context.max_tokens
    engine = made_engine(args, model, context)
    engine.reset()
    records, decode_only = run(args, engine)
    results = {
        "requests": [
            {
                "prompt": one.prompt,
                "prompt_tokens": one.prompt_tokens.tolist(),
                "tokens": one.generated_tokens,
                "text": one.generated_text,
                "log_probs": (one.prompt_log_probs or []) + one.generated_log_probs,
                "top_n": one.generated_top_n_logprobs,
                "prompt_top_n": one.prompt_top_n_logprobs,
                "events": [event.type.name for event in one.events],
                "status": one.serialize()["status"],
                "top_k": one.sampling_params.top_k,
            }
            for one in records
        ],
        "decode_only": decode_only,
        "steps": engine.step_count,
        "capture_stats": engine.capture_stats,
        "max_tokens": [planned, context.max_tokens],
        "max_requests": context.max_requests,
        "blocks": context.block_allocator.active_count,
        "prefill_tokens": engine.lifetime_prefill_token_count,
        "is_subclass": isinstance(engine, DynamicInferenceEngine),
    }
    write(args.output_path, results)


def add_own_args(parser: Any) -> Any:
    parser.add_argument("--with-inference-config", action="store_true")
    parser.add_argument("--skip-prompt-log-probs", action="store_true")
    parser.add_argument("--null-library", default="null")
    return add_script_args(parser)


if __name__ == "__main__":
    main()
