"""FA-5: SmolLM2-135M-Instruct beside transformers: alone, together, cached, drafted, quantized, served, with tools."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from arguments.parser import parse_server_arguments
from megatron_ext import LoadedEngine, load_engine
from megatron_ext.config import RequestParams
from megatron_ext.scheduling.record import RequestRecord
from megatron_ext.server.run import build_serving
from megatron_ext.text.tokenizer import TextTokenizer
from tests.on_request import long_except
from tests.unit_tests.support.agent_loop import check_brief_cache, play_briefly
from tests.unit_tests.support.chat_turns import TURNS, play_all
from tests.unit_tests.support.server import LiveServer

pytestmark = pytest.mark.published

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "out/published/model"
TOKENS, BLOCK, END = 24, 64, 2
TEXT = (ROOT / "LICENSE").read_text("utf-8") * 2
QUESTIONS = (
    "What is the capital of France?",
    "Write a haiku about rain.",
    "List three uses of a hammer.",
    "def mean(values):",
    "Explain photosynthesis to a child.",
    "Translate to Spanish: good morning, my friend.",
    "Was ist die Hauptstadt von Österreich? 日本の首都は?",
    "Count from one to twenty in words.",
    "1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89,",
    "Who wrote Romeo and Juliet, and when?",
    "Give me a recipe for pancakes with four ingredients.",
)
FEW_CHATS, CHATS = range(4), [range(first, first + 50) for first in range(0, 200, 50)]
CHARACTERS = (1_000, 2_500, 5_000, 9_000, 14_900)  # of a text that prompts share; the last one has 3,000 tokens
NEAR = 1e-3  # logits this close are a tie, which other instructions may break otherwise
BOUNDS = {
    "float32": (1e-4, 1e-3),
    "bfloat16": (0.25, 2.0),
    "int8": (0.3, 2.0),
}  # of log-probs: 95th percentile, largest


@dataclass(frozen=True)
class Reference:
    """Tokens and log-probs of transformers for a prompt.

    Attributes:
        prompt: Token ids.
        tokens: Greedy continuation, without the end token.
        log_probs: Of each token after the first.
        rows: Log-probs of all tokens at each position of the continuation.
    """

    prompt: list[int]
    tokens: list[int]
    log_probs: np.ndarray
    rows: list[Tensor]


@torch.inference_mode()
def computed(model: PreTrainedModel, prompt: list[int]) -> Reference:
    """Compute a prompt in one forward, whose logits are made in parts, and then token by token."""
    ids = torch.tensor(prompt)
    out = model.model(ids[None], use_cache=True)
    states, tokens, rows, log_probs = out.last_hidden_state[0], [], [], []
    for first in range(0, len(prompt) - 1, 256):
        following = ids[first + 1 : first + 257, None]
        part = model.lm_head(states[first : first + len(following)]).log_softmax(-1)
        log_probs += part.gather(1, following)[:, 0].tolist()
    for _ in range(TOKENS):
        rows.append(model.lm_head(out.last_hidden_state[0, -1]).log_softmax(-1))
        token = int(rows[-1].argmax())
        if token == END:
            break
        tokens.append(token)
        log_probs.append(float(rows[-1][token]))
        out = model.model(torch.tensor([[token]]), past_key_values=out.past_key_values, use_cache=True)
    return Reference(prompt, tokens, np.array(log_probs), rows)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()


def chat_ids(tokenizer: PreTrainedTokenizerBase, messages: list[dict]) -> list[int]:
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


@pytest.fixture(scope="module")
def references(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> list[Reference]:
    texts = [*QUESTIONS, *(f"Summarize this text.\n\n{TEXT[:count]}" for count in CHARACTERS)]
    prompts = [chat_ids(tokenizer, [{"role": "user", "content": text}]) for text in texts]
    assert len(prompts) == 16
    assert max(map(len, prompts)) > 2_900
    return [computed(model, prompt) for prompt in prompts]


@contextlib.contextmanager
def engine(**settings: object) -> Iterator[LoadedEngine]:
    pools = {"inference_dynamic_batching_block_count": 260, "inference_dynamic_batching_block_size": BLOCK}
    with load_engine(load_hf=str(MODEL), **pools, **settings) as loaded:
        yield loaded


def check_tokens(found: Sequence[int], reference: Reference) -> int:
    """Check a greedy continuation, up to the first tie, and return the number of tokens that are equal."""
    found = list(found[:-1] if found and found[-1] == END else found)
    for index, (ours, theirs) in enumerate(zip(found, reference.tokens, strict=False)):
        if ours != theirs:
            row = reference.rows[index]
            assert float(row[theirs] - row[ours]) < NEAR, (index, ours, theirs)
            return index
    assert len(found) == len(reference.tokens)
    return len(found)


def check(records: Sequence[RequestRecord], references: Sequence[Reference]) -> None:
    """Check greedy tokens and their log-probs in 32 bits, and log-probs of the prompts where they were asked for."""
    for record, reference in zip(records, references, strict=True):
        equal, start = check_tokens(record.generated_tokens, reference), len(reference.prompt) - 1
        within(record.generated_log_probs[:equal], reference.log_probs[start : start + equal], "float32")
        if record.prompt_log_probs:
            within(record.prompt_log_probs, reference.log_probs[:start], "float32")


def within(found: Sequence[float], wanted: np.ndarray, kind: str) -> None:
    differences = np.abs(np.asarray(found) - wanted)
    usual, largest = BOUNDS[kind]
    assert np.quantile(differences, 0.95) <= usual, np.quantile(differences, 0.95)
    assert differences.max() <= largest, differences.max()


def test_the_model_knows_something(tokenizer: PreTrainedTokenizerBase, references: list[Reference]) -> None:
    """The control: weights whose conversion is wrong would agree with themselves."""
    assert "Paris" in tokenizer.decode(references[0].tokens)
    assert references[-1].log_probs.mean() > -3


def test_prompts_are_tokenized_alike(references: list[Reference]) -> None:
    tokenizer = TextTokenizer(MODEL)
    for text, reference in zip(QUESTIONS, references, strict=False):
        assert tokenizer.render_chat([{"role": "user", "content": text}]).ids() == reference.prompt


def test_alone_and_together(references: list[Reference]) -> None:
    """Each prompt alone with its own log-probs, then all at once, cold and warm."""
    params = RequestParams(num_tokens_to_generate=TOKENS, return_log_probs=True)
    prompts = [one.prompt for one in references]
    with engine() as loaded:
        check([loaded.generate(one, params)[0] for one in prompts], references)
        cached = RequestParams(num_tokens_to_generate=TOKENS, return_log_probs=True, skip_prompt_log_probs=True)
        warm = loaded.generate(prompts, cached)
        check(warm, references)
        skipped = [one.skipped_prefill_token_count for one in warm]
        assert skipped == [min(len(one) // BLOCK * BLOCK, len(one) - 1) for one in prompts]
    with engine() as loaded:
        check(loaded.generate(prompts, cached), references)


def test_drafts_of_n_grams(references: list[Reference]) -> None:
    params = RequestParams(num_tokens_to_generate=TOKENS, return_log_probs=True, skip_prompt_log_probs=True)
    with engine(speculative_method="ngram", num_speculative_tokens=4, speculative_adaptive=False) as loaded:
        records = loaded.generate([one.prompt for one in references], params)
    check(records, references)
    assert sum(one.accepted_token_count for one in records) > 10


@pytest.mark.parametrize(
    ("kind", "settings"), [("bfloat16", {"bf16": True}), ("int8", {"cpu_weight_quantization": "int8"})]
)
def test_fewer_bits(kind: str, settings: dict, references: list[Reference]) -> None:
    """Log-probs of prompts and of transformers' continuations."""
    params = RequestParams(num_tokens_to_generate=0, return_log_probs=True)
    with engine(**settings) as loaded:
        records = loaded.generate([[*one.prompt, *one.tokens] for one in references], params)
    found = np.concatenate([record.prompt_log_probs for record in records])
    within(found, np.concatenate([one.log_probs for one in references]), kind)


def common(one: Sequence[int], other: Sequence[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def test_a_chat_over_the_server(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> None:
    """Five turns: tokens of transformers' template and greedy answers, and cached tokens as counted by hand."""
    pools = ["--inference-dynamic-batching-block-count", "100", "--inference-dynamic-batching-block-size", "16"]
    server = LiveServer(build_serving(parse_server_arguments(["--load-hf", str(MODEL), *pools])))
    messages: list[dict] = []
    computed_before: list[int] = []
    try:
        for question in (*QUESTIONS[:3], *QUESTIONS[9:]):
            messages.append({"role": "user", "content": question})
            body = {"messages": messages, "max_tokens": TOKENS, "temperature": 0, "return_token_ids": True}
            answer = server.http.post("/v1/chat/completions", json=body).json()
            prompt, (choice,), usage = chat_ids(tokenizer, messages), answer["choices"], answer["usage"]
            assert usage["prompt_tokens"] == len(prompt)
            check_tokens(choice["token_ids"], computed(model, prompt))
            hit = min(common(prompt, computed_before) // 16 * 16, len(prompt) - 1)
            assert usage["prompt_tokens_details"]["cached_tokens"] == hit
            computed_before = [*prompt, *choice["token_ids"][:-1]]  # the last token is never computed
            messages.append({"role": "assistant", "content": choice["message"]["content"]})
    finally:
        server.stop()
    assert hit > 100


@pytest.mark.parametrize("seeds", long_except([FEW_CHATS], [FEW_CHATS, *CHATS]), ids=str)
def test_each_turn_resumes_where_the_last_one_ended(seeds: range) -> None:
    """SA-15: the template shows answers as they were generated, so each turn resumes. 200 chats with the long tests."""
    pools = ["--inference-dynamic-batching-block-count", "1000", "--inference-dynamic-batching-block-size", "16"]
    words = ["--load-hf", str(MODEL), *pools, "--explain-prefix-cache"]
    server = LiveServer(build_serving(parse_server_arguments(words)))
    server.http.timeout = 600.0  # chats compute long prompts side by side
    try:
        counts = play_all(server, seeds, together=4)
    finally:
        server.stop()
    print(dict(counts))
    assert counts["resumed"] + counts["a special token"] == (TURNS - 1) * len(seeds), counts
    assert counts["a special token"] <= len(seeds) // 10


def test_an_agents_loop(tokenizer: PreTrainedTokenizerBase) -> None:
    """S15: two tools and three turns with forced calls, although the model's template has no tools."""
    pools = ["--inference-dynamic-batching-block-count", "100", "--inference-dynamic-batching-block-size", "16"]
    server = LiveServer(build_serving(parse_server_arguments(["--load-hf", str(MODEL), *pools])))
    try:
        turns = play_briefly(server.url, parallel_tool_calls=False)  # it would call and call
    finally:
        server.stop()
    check_brief_cache(turns, 16, [END])
    shown = tokenizer.decode(turns[2].prompt)
    assert shown.count("<|im_start|>assistant\n<tool_call>\n") == 2
    assert shown.count("<|im_start|>user\n<tool_response>\n") == 2
    assert tokenizer.decode(turns[2].answer).strip()
