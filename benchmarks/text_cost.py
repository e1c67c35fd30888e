"""Host cost of a generated token as text: delivery to the event loop, streaming, search for stop words.

Run: `python -m benchmarks.text_cost`. No model, only the embedded one's tokenizer; microseconds a token where a text is
so long, the median of windows of 256 tokens. Nothing may grow with the text. For comparison there is what it costs to
copy everything in every step, and to decode everything: compare figures of one run only.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from itertools import cycle, islice

from rich.console import Console
from rich.table import Table

from megatron_ext.config import RequestParams
from megatron_ext.config.embedded import EMBEDDED_MODEL_DIR
from megatron_ext.engine.client_request import EngineRequest
from megatron_ext.offline.prompts import example_prompts
from megatron_ext.scheduling.request import Request
from megatron_ext.scheduling.submission import Submission
from megatron_ext.server.client.request_handle import RequestHandle
from megatron_ext.server.openai.engine_requests import RequestSpec
from megatron_ext.text.stop_words import StopWordMatcher
from megatron_ext.text.text_stream import TextStream
from megatron_ext.text.tokenizer import TextTokenizer

LENGTHS = (1_024, 16_384)
WINDOW = 256  # tokens that are timed together
WINDOWS = 3  # of them, up to each length
STOP_WORDS = ("\nUser:", "<|end|>", "no such word")
Step = Callable[[int], object]  # a token comes; what is timed


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    console = Console(highlight=False)
    console.print(cost_table(parser.parse_args().repeats))


def cost_table(repeats: int) -> Table:
    """Microseconds a token."""
    columns = [f"{length:,} tokens, us" for length in LENGTHS]
    table = Table("work", *columns, "ratio", title="what a token costs")
    tokenizer = TextTokenizer(EMBEDDED_MODEL_DIR)
    tokens = generation(tokenizer, max(LENGTHS))
    for name, make in works(tokenizer).items():
        runs = [costs(make(), tokens) for _ in range(repeats)]
        medians = [statistics.median(run[i] for run in runs) for i in range(len(LENGTHS))]
        table.add_row(name, *(f"{1e6 * one:.2f}" for one in medians), f"{medians[-1] / medians[0]:.2f}")
    return table


def works(tokenizer: TextTokenizer) -> dict[str, Callable[[], Step]]:
    """Work done for a token, created anew for each run."""
    return {
        "handed over": lambda: handed_over(scores=False),
        "handed over with log-probs": lambda: handed_over(scores=True),
        "(copied whole)": lambda: copied_whole(scores=False),
        "(copied whole with log-probs)": lambda: copied_whole(scores=True),
        "streamed": lambda: streamed(tokenizer, ()),
        "streamed, stop words": lambda: streamed(tokenizer, STOP_WORDS),
        "searched for stop words": lambda: searched(tokenizer),
        "(decoded whole)": lambda: decoded_whole(tokenizer),
    }


def generation(tokenizer: TextTokenizer, length: int) -> list[int]:
    """The first tokens of the shipped prompts, over and over: before each of `LENGTHS` stands the same text."""
    text = "\n".join(prompt.content for prompt in example_prompts(RequestParams()))
    plain = [token for token in tokenizer.tokenize(text) if tokenizer.detokenize([token])]
    return list(islice(cycle(plain[: LENGTHS[0]]), length))


def costs(step: Step, tokens: list[int]) -> list[float]:
    """Seconds a token of the last windows before each length."""
    found, position = [], 0
    for length in LENGTHS:
        for token in tokens[position : length - WINDOW * WINDOWS]:
            step(token)
        windows = []
        for start in range(length - WINDOW * WINDOWS, length, WINDOW):
            began = time.perf_counter()
            for token in tokens[start : start + WINDOW]:
                step(token)
            windows.append((time.perf_counter() - began) / WINDOW)
        found.append(statistics.median(windows))
        position = length
    return found


def make_request() -> Request:
    """A request of a short prompt."""
    return Request(Submission(0, (1, 2, 3), RequestParams(), arrival=0, seed=0))


def grow(request: Request, token: int, *, scores: bool) -> None:
    """A step's token, and what belongs to it."""
    request.append(token)
    if scores:
        request.output.generated_log_probs.append(-0.5)
        request.output.generated_top_n.append({token: -0.5})


def handed_over(*, scores: bool) -> Step:
    """Step that delivers a token from the engine's thread to the event loop's handle, appending included."""
    request = make_request()
    stream = EngineRequest(request.prompt_tokens, request.params, is_streamed=True, request=request)
    handle = RequestHandle(stream, RequestSpec(request.prompt_tokens, request.params))

    def step(token: int) -> None:
        grow(request, token, scores=scores)
        stream.collect()
        while stream.updates:
            handle.take(stream.updates.popleft())

    return step


def copied_whole(*, scores: bool) -> Step:
    """Step that copies everything generated so far, for comparison."""
    request = make_request()

    def step(token: int) -> tuple[tuple, ...]:
        grow(request, token, scores=scores)
        return (
            tuple(request.tokens[request.prompt_length :]),
            tuple(request.output.generated_log_probs),
            tuple(request.output.generated_top_n),
        )

    return step


def streamed(tokenizer: TextTokenizer, words: tuple[str, ...]) -> Step:
    """A stream's text."""
    stream = TextStream(words, tokenizer.detokenize)
    return lambda token: stream.feed([token])


def searched(tokenizer: TextTokenizer) -> Step:
    """The engine's search for stop words."""
    matcher = StopWordMatcher(STOP_WORDS, tokenizer.detokenize)
    return lambda token: matcher.feed([token])


def decoded_whole(tokenizer: TextTokenizer) -> Step:
    """All the text, anew in every step of those that are timed; before them it would take minutes."""
    tokens: list[int] = []
    timed = {position for length in LENGTHS for position in range(length - WINDOW * WINDOWS, length)}

    def step(token: int) -> str:
        tokens.append(token)
        return tokenizer.detokenize(tokens) if len(tokens) - 1 in timed else ""

    return step


if __name__ == "__main__":
    main()
