"""Host cost of a generated token as text: delivery to the event loop, streaming, search for stop words.

No model, only the embedded one's tokenizer. The cost may not grow with the text; for comparison there are copies of
everything in every step, and decoding of everything.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from itertools import cycle, islice

from benchmarks.cases import Run, case
from megatron_ext.config import RequestParams
from megatron_ext.config.differences import EMBEDDED_MODEL_DIR
from megatron_ext.offline.prompts import example_prompts
from megatron_ext.scheduling.request import Request
from megatron_ext.scheduling.request_inputs import RequestInputs
from megatron_ext.server.request_manager import RequestHandle
from megatron_ext.text.detokenizer import StopWordMatcher, TextStream
from megatron_ext.text.tokenizer import TextTokenizer

LENGTHS = (1_024, 16_384)
WINDOW = 256  # tokens timed together
WINDOWS = 3  # of them, up to each length
STOP_WORDS = ("\nUser:", "<|end|>", "no such word")
Step = Callable[[int], object]
"""Work for one token, which is timed."""


@case("serving", quick={"repeats": 1, "lengths": (1_024,)})
def text(run: Run, repeats: int = 5, lengths: tuple = LENGTHS) -> None:
    """Microseconds of a generated token after short and long texts: medians of windows of 256 tokens."""
    tokenizer = TextTokenizer(EMBEDDED_MODEL_DIR)
    tokens = generation(tokenizer, max(lengths))
    for name, make in works(tokenizer).items():
        runs = [costs(make(), tokens, lengths) for _ in range(repeats)]
        medians = [1e6 * statistics.median(taken[i] for taken in runs) for i in range(len(lengths))]
        found = {f"after {length:,} tokens, us": one for length, one in zip(lengths, medians, strict=True)}
        run.row(name, {**found, "longest / shortest": medians[-1] / medians[0]})


def works(tokenizer: TextTokenizer) -> dict[str, Callable[[], Step]]:
    """Return makers of the work for a token, by name."""
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
    """Return the first tokens of the shipped prompts over and over, so that all lengths end in the same text."""
    text = "\n".join(prompt.content for prompt in example_prompts(RequestParams()))
    plain = [token for token in tokenizer.tokenize(text) if tokenizer.detokenize([token])]
    return list(islice(cycle(plain[: LENGTHS[0]]), length))


def costs(step: Step, tokens: list[int], lengths: tuple[int, ...]) -> list[float]:
    """Return the seconds a token of the last windows before each length."""
    found, position = [], 0
    for length in lengths:
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
    """Build a request with a short prompt."""
    return Request(0, RequestInputs((1, 2, 3), RequestParams()), arrival=0, seed=0)


def grow(request: Request, token: int, *, scores: bool) -> None:
    """Append a step's token and its scores."""
    request.append(token)
    if scores:
        request.output.generated_log_probs.append(-0.5)
        request.output.generated_top_n.append({token: -0.5})


def handed_over(*, scores: bool) -> Step:
    """Step that delivers a token from the engine's thread to the event loop's handle, appending included."""
    request = make_request()
    handle = RequestHandle(request.inputs, is_streamed=True, request=request)

    def step(token: int) -> None:
        grow(request, token, scores=scores)
        handle.collect()
        while handle.updates:
            handle.take(handle.updates.popleft())

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
    """Step that turns a token into a stream's text."""
    stream = TextStream(words, tokenizer.detokenize)
    return lambda token: stream.feed([token])


def searched(tokenizer: TextTokenizer) -> Step:
    """Step of the engine's search for stop words."""
    matcher = StopWordMatcher(STOP_WORDS, tokenizer.detokenize)
    return lambda token: matcher.feed([token])


def decoded_whole(tokenizer: TextTokenizer) -> Step:
    """Step that decodes all the text anew, if it is timed; in all steps that would take minutes."""
    tokens: list[int] = []
    timed = {position for length in LENGTHS for position in range(length - WINDOW * WINDOWS, length)}

    def step(token: int) -> str:
        tokens.append(token)
        return tokenizer.detokenize(tokens) if len(tokens) - 1 in timed else ""

    return step
