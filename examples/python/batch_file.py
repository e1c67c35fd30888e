"""A file of prompts in, a file of answers out: one JSON object a line, in the same order.

python -m examples.python.batch_file prompts.jsonl answers.jsonl
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from megatron_ext import LoadedEngine, RequestParams, Status, load_engine


def answer_file(engine: LoadedEngine, prompts: Path, answers: Path, params: RequestParams) -> float:
    """Answer every line of a file.

    Args:
        engine: Serves them, all at once: it decides how many run in a step.
        prompts: A line has `text` or `token_ids`.
        answers: Written.
        params: What each asks for.

    Returns:
        The share of all prompt tokens that were skipped, since they were cached.
    """
    lines = [json.loads(line) for line in prompts.read_text("utf-8").splitlines() if line.strip()]
    records = engine.generate([line["text"] if "text" in line else line["token_ids"] for line in lines], params)
    with answers.open("w", encoding="utf-8") as file:
        for record in records:
            answer = {"answer": record.generated_text, "finish_reason": record.finish_reason}
            if record.status is not Status.COMPLETED:  # such as a prompt that is longer than the model
                answer = {"answer": None, "error": record.error}
            print(json.dumps(answer), file=file)
    skipped = sum(record.skipped_prefill_token_count for record in records)
    return skipped / max(1, sum(record.prompt_token_count for record in records))


def main(prompts: str, answers: str) -> None:
    """Answer prompts with the embedded model; `load_engine(load_hf=...)` and `load_engine(load=...)` load others."""
    with load_engine(inference_dynamic_batching_block_size=32) as engine:
        share = answer_file(engine, Path(prompts), Path(answers), RequestParams(num_tokens_to_generate=40))
    print(f"{share:.0%} of the prompts' tokens were skipped")


if __name__ == "__main__":
    main(*sys.argv[1:])
