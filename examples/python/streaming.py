"""Answers part by part, several at once, in an event loop; one of them is left early.

python -m examples.python.streaming
"""

from __future__ import annotations

import asyncio

from megatron_ext import LoadedEngine, RequestParams, load_engine

QUESTIONS = ["What does json.loads do?", "What does a generator do?", "What is a list comprehension?"]


async def show(engine: LoadedEngine, question: str, params: RequestParams) -> str:
    """Print an answer while it is generated, and return it."""
    answer = ""
    async for part in engine.stream(question, params):
        print(f"{question[:20]:20} | {part.text!r}")
        answer += part.text
    return answer


async def first_sentence(engine: LoadedEngine, question: str, params: RequestParams) -> str:
    """Return an answer up to its first full stop: leaving the loop ends the request, and frees its memory at once."""
    answer = ""
    async for part in engine.stream(question, params):
        answer += part.text
        if "." in answer:
            break
    return answer.partition(".")[0].strip()


async def answer_all(engine: LoadedEngine) -> list[str]:
    """Answer all questions at once, and one of them a second time up to its first full stop."""
    params = RequestParams(num_tokens_to_generate=24, temperature=0.7, top_p=0.9, seed=1)
    long = RequestParams(num_tokens_to_generate=400)
    tasks = [show(engine, question, params) for question in QUESTIONS]
    return list(await asyncio.gather(*tasks, first_sentence(engine, QUESTIONS[0], long)))


def main() -> None:
    """Answer the questions with the embedded model."""
    with load_engine() as engine:
        answers = asyncio.run(answer_all(engine))
    print(f"the first sentence of another answer: {answers[-1]}")


if __name__ == "__main__":
    main()
