# SPDX-License-Identifier: Apache-2.0
"""Which conversations do benchmarks hold with an instruct model? Requests about real local text, and open questions.

The text is Python's standard library and its language reference, as in benchmarks/workloads.py. The model's own chat
template makes the prompts and the model gives the answers, which later prompts of the conversation contain.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from benchmarks.workloads import NUM_PASSAGES, Session, Turn, library_functions, reference_passages
from fastdeploy.core.request import GenerationRequest
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.detokenize.tokenizer import Tokenizer
from fastdeploy.engine.engine import Engine

MIN_ANSWER = 16  # tokens: of shorter answers there is nothing to time
QUESTIONS = """
    What is the difference between a virus and a bacterium?
    How do I make a good vegetable soup?
    Why is the sky blue during the day and red in the evening?
    What should I see on a first visit to Rome?
    How does a bicycle stay upright while it moves?
    Can you give me some advice for a job interview?
    Write a short story about a fox who finds a lost letter.
    What are the main causes of the seasons on Earth?
    How can I fall asleep more easily?
    Explain to a child what money is for.
    What makes bread rise, and what happens if I forget the yeast?
    Write a polite email that asks a colleague to move a meeting to Friday.
    Which planets of the solar system have rings?
    How do vaccines protect us from diseases?
    Give me some ideas for a birthday party in a small garden.
    Why do leaves change their color in autumn?
    What is the purpose of a constitution?
    How do I begin to learn the guitar?
    What are the advantages of trains over cars?
    Describe a quiet morning at the sea.
    How does a refrigerator keep food cold?
    What is the meaning of the proverb that a stitch in time saves nine?
    Which exercises can I do at home without any equipment?
    How did people tell the time before there were clocks?
"""


@dataclass(frozen=True)
class Function:
    """A function of the library: its source, its name, and the name of its first parameter."""

    source: str
    name: str
    parameter: str


def summary(rng: random.Random) -> Iterator[list[str]]:
    """Yield requests for a summary of a passage of a manual."""
    for passage in passages(rng, 3):
        yield [f"Summarize the following text in three sentences.\n\n{passage}"]


def edit(rng: random.Random) -> Iterator[list[str]]:
    """Yield requests for a change of a function, which is to be returned as a whole."""
    for number, function in enumerate(functions(rng)):
        change = changes(function)[number % 2]
        yield [f"Here is a Python function.\n\n{block(function)}\n\n{change} Return the whole function."]


def quote(rng: random.Random) -> Iterator[list[str]]:
    """Yield requests for quotes from given passages of a manual."""
    for given in groups(rng, NUM_PASSAGES):
        numbered = "\n\n".join(f"[{number}] {passage}" for number, passage in enumerate(given, 1))
        first, second = sorted(rng.sample(range(1, NUM_PASSAGES + 1), 2))
        yield [f"{numbered}\n\nQuote passages [{first}] and [{second}] word for word, each with its number."]


def agent(rng: random.Random) -> Iterator[list[str]]:
    """Yield an agent's requests: a file's contents, then results of its tools, each with the next change of the file.

    Every answer is to be the whole file, so it repeats the first request and the earlier answers.
    """
    for function in functions(rng):
        file = f"{function.name}.py"
        first, *others = changes(function)
        yield [
            f"Result of read_file('{file}'):\n\n{block(function)}\n\n{first} Reply with the whole file.",
            *(f"Result of write_file('{file}'): ok. {change} Reply with the whole file again." for change in others),
        ]


def free(rng: random.Random) -> Iterator[list[str]]:
    """Yield open questions."""
    questions = [line.strip() for line in QUESTIONS.strip().splitlines()]
    for question in rng.sample(questions, len(questions)):
        yield [question]


CHATS: dict[str, Callable[[random.Random], Iterator[list[str]]]] = {
    "chat-summary": summary,
    "chat-edit": edit,
    "chat-quote": quote,
    "chat-agent": agent,
    "chat-free": free,
}
"""Workload -> what the user says in each conversation, turn by turn."""


def block(function: Function) -> str:
    """Return a function as a message shows it."""
    return f"```python\n{function.source}```"


def changes(function: Function) -> list[str]:
    """Return changes that one may ask for, one after the other."""
    return [
        f"Rename the parameter `{function.parameter}` of `{function.name}` to `{function.parameter}_value`.",
        f"Add a docstring to `{function.name}`.",
        f"Raise a ValueError if `{function.parameter}_value` is None.",
        "Add a line that prints the result before it is returned.",
    ]


def functions(rng: random.Random) -> Iterator[Function]:
    """Yield the library's functions of 8 to 30 lines that have a parameter."""
    for source in library_functions(8, 30, rng.getrandbits(32)):
        definition = ast.parse(source).body[0]
        assert isinstance(definition, ast.FunctionDef)
        if definition.args.args:
            yield Function(source, definition.name, definition.args.args[0].arg)


def groups(rng: random.Random, size: int) -> Iterator[list[str]]:
    """Yield disjoint groups of neighbouring paragraphs of a manual, in random order."""
    found = reference_passages()
    starts = range(0, len(found) - size + 1, size)
    for start in rng.sample(starts, len(starts)):
        yield found[start : start + size]


def passages(rng: random.Random, size: int) -> Iterator[str]:
    """Yield passages of several paragraphs."""
    for group in groups(rng, size):
        yield "\n\n".join(group)


class Partner:
    """A model that answers, alone in its engine."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._engine, self._tokenizer, self._params = engine, tokenizer, params

    def hold(self, requests: Sequence[str], max_prompt_tokens: int) -> Session | None:
        """Return the conversation with the model's answers; None if a prompt is too long or an answer too short."""
        messages: list[dict[str, str]] = []
        session = []
        for request in requests:
            messages.append({"role": "user", "content": request})
            prompt = self._tokenizer.encode(self._tokenizer.apply_chat_template(messages), add_special_tokens=False)
            if len(prompt) > max_prompt_tokens:
                return None
            answer = self._answer(prompt)
            if len(answer) < MIN_ANSWER:
                return None
            session.append(Turn(prompt, answer))
            messages.append({"role": "assistant", "content": self._tokenizer.decode(answer)})
        return session

    def _answer(self, prompt: list[int]) -> list[int]:
        self._engine.add_request(GenerationRequest("chat", prompt, self._params))
        answer: list[int] = []
        while self._engine.has_unfinished():
            answer += [token for delta in self._engine.step() for token in delta.token_ids]
        return answer


def conversations(workload: str, partner: Partner, count: int, max_prompt_tokens: int, seed: int) -> list[Session]:
    """Return `count` conversations of a workload; those with long prompts or short answers are left out.

    Raises:
        ValueError: the local text has fewer.
    """
    found = []
    for requests in CHATS[workload](random.Random(seed)):
        session = partner.hold(requests, max_prompt_tokens)
        if session is not None:
            found.append(session)
        if len(found) == count:
            return found
    raise ValueError(f"{workload}: {len(found)} conversations fit, {count} are needed")
