"""Script of our own that uses Megatron's high-level interface as offline_inference.py does."""

from __future__ import annotations

from examples.inference.requests import add_script_args, write
from megatron.core.inference.apis import MegatronLLM
from megatron.core.inference.sampling_params import SamplingParams
from megatron.training import get_args, initialize_megatron
from megatron.training.arguments import parse_and_validate_args
from megatron.training.checkpointing import load_checkpoint
from megatron.training.models import GPTModelBuilder

from megatron_ext.text.tokenizer import NullTokenizer


def main() -> None:
    parse_and_validate_args(extra_args_provider=add_script_args)
    initialize_megatron()
    args = get_args()
    models = GPTModelBuilder(args).build_distributed_models(pg_collection=None, wrap_with_ddp=False)
    load_checkpoint(models, None, None)
    params = SamplingParams(top_k=1, num_tokens_to_generate=args.num_tokens_to_generate)
    with MegatronLLM(model=models[0].eval(), tokenizer=NullTokenizer(56), use_coordinator=False) as llm:
        requests = llm.generate(args.prompts, params)
        steps = llm.engine.context.step_count
    write(args.output_path, {"tokens": [one.generated_tokens for one in requests], "steps": steps})


if __name__ == "__main__":
    main()
