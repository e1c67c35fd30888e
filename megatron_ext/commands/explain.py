"""Command `explain`: why a prompt misses another one's cached prefix; the first token that differs, and its cost.

Of the files A and B, A is served first, then B. A file is text, or JSON: a list of token ids, or an object with
`text` or `token_ids`, as a line of a prompt file.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_ext.config import EvictionPolicyName, RequestParams
from megatron_ext.config.differences import EMBEDDED_MODEL_DIR
from megatron_ext.errors import ConfigError
from megatron_ext.files import read_text
from megatron_ext.prefix_cache.hash_chain import packed_tokens
from megatron_ext.scheduling.explanation import Explanation
from megatron_ext.scheduling.plan import SchedulerLimits
from megatron_ext.scheduling.request import Request
from megatron_ext.scheduling.request_inputs import RequestInputs
from megatron_ext.scheduling.scheduler import Scheduler
from megatron_ext.scheduling.step import describe_step
from megatron_ext.text.detokenizer import excerpt

if TYPE_CHECKING:
    from megatron_ext.text.tokenizer import Tokenizer

PROGRAM = "megatron-ext explain"
DONE, BAD_USAGE = 0, 2
LONGEST_PROMPT = 2**24  # bytes of a file
_SLOTS = 64


def main(argv: Sequence[str] | None = None, *, program: str = PROGRAM) -> int:
    """Read the prompts, serve them without computing, and print the explanation.

    Returns:
        Exit code: 0 done, 2 bad usage.
    """
    parser = argparse.ArgumentParser(prog=program, description=__doc__)
    parser.add_argument("first", type=Path, metavar="A", help="prompt that was served before")
    parser.add_argument("second", type=Path, metavar="B", help="prompt that should have hit")
    parser.add_argument("--block-size", type=int, default=64, help="tokens")
    parser.add_argument("--attention-only", action="store_true", help="assume a model without recurrent layers")
    parser.add_argument(
        "--tokenizer",
        type=Path,
        default=EMBEDDED_MODEL_DIR,
        metavar="DIR",
        help="tokenizer of texts; default: the embedded model's",
    )
    arguments = parser.parse_args(argv)
    try:
        if arguments.block_size < 1:
            raise ConfigError(f"--block-size {arguments.block_size} must be 1 or more")
        first, _ = read_prompt(arguments.first, arguments.tokenizer)
        second, tokenizer = read_prompt(arguments.second, arguments.tokenizer)
        said = explain_second(first, second, arguments.block_size, is_hybrid=not arguments.attention_only)
    except ConfigError as error:
        print(f"{program}: error: {error}", file=sys.stderr)
        return BAD_USAGE
    around = None if tokenizer is None else excerpt(second, said.place, tokenizer.detokenize)
    print(f"{said.skipped} of {len(second)} tokens are skipped: {said.text(around)}")
    if said.advice is not None:
        print(said.advice)
    return DONE


def read_prompt(path: Path, tokenizer: Path) -> tuple[tuple[int, ...], Tokenizer | None]:
    """Return the token ids of a file, and the tokenizer that made them of text, if any.

    Raises:
        ConfigError: The file cannot be read, or has no tokens.
    """
    text = read_text(path, LONGEST_PROMPT)
    content: object = text
    if text.lstrip()[:1] in ("[", "{"):
        try:
            content = json.loads(text)
        except (ValueError, RecursionError):
            content = text  # not JSON after all
    if isinstance(content, dict):
        content = content.get("token_ids", content.get("text"))
    used: Tokenizer | None = None
    if isinstance(content, str):
        from megatron_ext.text.tokenizer import TextTokenizer

        used = TextTokenizer(tokenizer)
        content = used.tokenize(content)
    try:
        tokens = tuple(packed_tokens(content)) if isinstance(content, list) else ()
    except (TypeError, OverflowError) as error:
        raise ConfigError(f"{path}: {error}; a prompt is a text or a list of token ids") from error
    if not tokens:
        raise ConfigError(f"{path} has no tokens; a prompt is a text or a list of token ids")
    return tokens, used


def explain_second(first: tuple[int, ...], second: tuple[int, ...], block_size: int, *, is_hybrid: bool) -> Explanation:
    """Return the explanation of `second` after only `first` has been served."""
    longest = max(len(first), len(second)) + 1
    limits = SchedulerLimits(
        block_size=block_size,
        total_blocks=-(-longest // block_size),  # the second prompt is explained before it evicts the first one
        paused_blocks=None,
        max_requests=1,
        max_tokens=longest,
        max_sequence_length=longest,
        chunked_prefill=True,
        explains=True,
    )
    scheduler = Scheduler(limits, EvictionPolicyName.LRU, b"explained", _SLOTS if is_hybrid else None)
    for place, tokens in enumerate((first, second)):
        inputs = RequestInputs(tokens, RequestParams(num_tokens_to_generate=1))
        request = Request(place, inputs, arrival=place, seed=0)
        scheduler.add(request)
        plan = scheduler.schedule()
        scheduler.commit(describe_step(plan.chunks, block_size), {place: 0})
    assert request.ledger.explanation is not None, "it was admitted"
    return dataclasses.replace(request.ledger.explanation, age=None)  # both were served just now
