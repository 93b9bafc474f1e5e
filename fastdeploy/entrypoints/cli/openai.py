# SPDX-License-Identifier: Apache-2.0
"""`fastdeploy chat` and `fastdeploy complete`: clients of a running server."""

from __future__ import annotations

import argparse
import asyncio
import codecs
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastdeploy.config.env import read_env
from fastdeploy.entrypoints.cli.http_client import HttpClient, ServerError, UnreachableError
from fastdeploy.entrypoints.cli.parser import CommandParser, add_api_key_flag, get_api_key, positive_int, server_url

DEFAULT_URL = "http://localhost:8000"
DIM, RESET = "\033[2m", "\033[0m"
TARGET = "target"
SOURCE_COLORS = {"ngram": 42, "suffix": 46, "mtp": 45, "draft_model": 44, "grammar": 43}  # ANSI background colours
OTHER_COLOR = 47
BYTES_PREFIX = "bytes:\\x"  # of a token's text if its bytes are not valid UTF-8 by themselves
QUESTION, BEGINNING = "How do plants make their food?", "The capital of Japan is"
CODE = "def fibonacci(n):"
VERBOSE_FIELDS = {"return_token_ids": True, "collect_metrics": True}  # a request with both gets `tokens` in its chunks


class TextPrinter:
    """Prints an answer as it arrives. Reasoning is dim on a terminal, and marked as such elsewhere."""

    def __init__(self) -> None:
        is_dim = sys.stdout.isatty() and not read_env().no_color
        self._begin, self._end = (DIM, RESET + "\n") if is_dim else ("[reasoning] ", "\n[answer] ")
        self._is_reasoning = False

    def print_delta(self, choice: Mapping[str, Any], text: str, reasoning: str) -> None:
        """Print the new text of a choice."""
        self._print(reasoning, is_reasoning=True)
        self._print(text, is_reasoning=False)

    def _print(self, text: str, is_reasoning: bool) -> None:
        if not text:
            return
        if is_reasoning != self._is_reasoning:
            print(self._begin if is_reasoning else self._end, end="")
            self._is_reasoning = is_reasoning
        print(text, end="", flush=True)

    def finish(self) -> None:
        """End the line, and the dim text if the answer broke off within the reasoning."""
        print(RESET if self._is_reasoning and self._begin == DIM else "")
        self._is_reasoning = False


class SourcePrinter:
    """Prints an answer token by token, accepted drafts in the colour of their source, and a summary at the end.

    Reasoning and special tokens are included. There are no colours without a terminal or with NO_COLOR.
    """

    def __init__(self) -> None:
        self._has_colors = sys.stdout.isatty() and not read_env().no_color
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._counts: Counter[str] = Counter()  # source -> tokens
        self._metrics: Mapping[str, Any] | None = None
        self._text_without_tokens = ""
        self._begin_s = time.monotonic()
        self._first_s: float | None = None

    def print_delta(self, choice: Mapping[str, Any], text: str, reasoning: str) -> None:
        """Print the new tokens of a choice."""
        tokens = choice.get("tokens")
        self._text_without_tokens = self._text_without_tokens + reasoning + text if tokens is None else ""
        self._print_tokens(tokens or ())
        self._metrics = choice.get("speculate_metrics") or self._metrics

    def _print_tokens(self, tokens: Sequence[Mapping[str, Any]]) -> None:
        if tokens and self._first_s is None:
            self._first_s = time.monotonic()
        for token in tokens:
            source = str(token.get("source", TARGET))
            self._counts[source] += 1
            print(self._colored(self._decode(str(token["text"])), source), end="")
        sys.stdout.flush()

    def finish(self) -> None:
        """Print the summary, or the plain text if the server does not send tokens."""
        print(self._decoder.decode(b"", final=True))
        if self._first_s is not None:
            print(f"({'; '.join(self._summary(time.monotonic(), self._first_s))})")
        if self._text_without_tokens:
            print(f"{self._text_without_tokens}\n(this server does not report the sources of its tokens)")

    def _summary(self, now_s: float, first_s: float) -> list[str]:
        total = self._counts.total()
        legend = [f"{self._colored(name, name)} {count}" for name, count in sorted(self._counts.items())]
        parts = [f"{total} tokens: {', '.join(legend)}"]
        if metrics := self._metrics:
            parts.append(f"mean acceptance length {metrics['average_accept_length']:.2f}")
            parts.append(f"{metrics['accepted_tokens']} of {metrics['drafted_tokens']} drafts accepted")
        if total > 1 and now_s > first_s:
            parts.append(f"{(total - 1) / (now_s - first_s):.1f} tokens/s")
        parts.append(f"time to first token {1000 * (first_s - self._begin_s):.0f} ms")
        return parts

    def _decode(self, text: str) -> str:
        if not text.startswith(BYTES_PREFIX):
            return self._decoder.decode(text.encode())
        return self._decoder.decode(bytes.fromhex(text.removeprefix("bytes:").replace("\\x", "")))

    def _colored(self, text: str, source: str) -> str:
        if not self._has_colors or source == TARGET or not text:
            return text
        begin = f"\033[30;{SOURCE_COLORS.get(source, OTHER_COLOR)}m"
        return "\n".join(f"{begin}{line}{RESET}" if line else "" for line in text.split("\n"))


@dataclass
class Session:
    """A server, the fields of every request, and the messages so far.

    Attributes:
        is_verbose: print the source of each token.
    """

    client: HttpClient
    fields: dict[str, Any]
    is_verbose: bool = False
    messages: list[dict[str, str]] = field(default_factory=list)

    async def chat(self, text: str) -> None:
        """Send a message and print the answer, and add both to the messages unless the answer is empty."""
        self.messages.append({"role": "user", "content": text})
        printer, answer = self._make_printer(), ""
        body = {**self.fields, "messages": self.messages, "stream": True}
        try:
            async for event in self.client.stream("/chat/completions", body):
                for choice in event["choices"]:
                    content = choice["delta"].get("content") or ""
                    delta = choice["delta"]
                    reasoning = delta.get("reasoning") or delta.get("reasoning_content") or ""  # two names of one text
                    printer.print_delta(choice, content, reasoning)
                    answer += content
        except (ServerError, UnreachableError):
            answer = ""
            raise
        finally:
            printer.finish()
            if answer:
                self.messages.append({"role": "assistant", "content": answer})
            else:
                self.messages.pop()

    async def complete(self, text: str) -> None:
        """Print the completion of a prompt."""
        printer = self._make_printer()
        try:
            async for event in self.client.stream("/completions", {**self.fields, "prompt": text, "stream": True}):
                for choice in event["choices"]:
                    printer.print_delta(choice, choice["text"], "")
        finally:
            printer.finish()

    def _make_printer(self) -> TextPrinter | SourcePrinter:
        return SourcePrinter() if self.is_verbose else TextPrinter()


def chat(arguments: list[str]) -> int:
    """Chat with the model: one message with --quick, otherwise until the end of the input."""
    parser = _make_parser("chat", "Chat with a running server. Ctrl-C stops an answer, Ctrl-D ends the conversation.")
    parser.add_argument("-q", "--quick", metavar="MESSAGE", help="send one message, print the answer and exit")
    parser.add_argument("--system-prompt", help="system message that begins the conversation")
    args = parser.parse_own(arguments)
    session = _make_session(args)
    if args.system_prompt:
        session.messages.append({"role": "system", "content": args.system_prompt})
    return _run(args, session, session.chat, QUESTION)


def complete(arguments: list[str]) -> int:
    """Complete prompts: one with --quick, otherwise one per line until the end of the input."""
    parser = _make_parser("complete", "Complete prompts on a running server, one prompt per line.")
    parser.add_argument("-q", "--quick", metavar="PROMPT", help="complete one prompt and exit")
    args = parser.parse_own(arguments)
    session = _make_session(args)
    return _run(args, session, session.complete, BEGINNING)


def _make_parser(command: str, description: str) -> CommandParser:
    parser = CommandParser(command, description)
    parser.add_argument(
        "--url", type=server_url, default=DEFAULT_URL, help="address of the server, with or without /v1"
    )
    parser.add_argument("--model-name", help="model to use; default: the first of /v1/models")
    add_api_key_flag(parser)
    parser.add_argument("--max-tokens", type=positive_int, default=512, help="maximum number of tokens of an answer")
    parser.add_argument("--temperature", type=float, help="sampling temperature, 0 for greedy; default: the server's")
    parser.add_argument(
        "--verbose", action="store_true", help="colour accepted drafts by their source and print a summary per answer"
    )
    return parser


def _make_session(args: argparse.Namespace) -> Session:
    fields: dict[str, Any] = {"max_tokens": args.max_tokens, **(VERBOSE_FIELDS if args.verbose else {})}
    if args.temperature is not None:
        fields["temperature"] = args.temperature
    return Session(HttpClient(f"{args.url}/v1", get_api_key(args)), fields, args.verbose)


def _run(args: argparse.Namespace, session: Session, send: Callable[[str], Any], example: str) -> int:
    """Send one text with --quick, else what is typed, after a line with an example of it on a terminal."""
    try:
        session.fields["model"] = args.model_name or asyncio.run(session.client.first_model())
        if args.quick is not None:
            asyncio.run(send(args.quick))
            return 0
    except (ServerError, UnreachableError) as error:
        return _print_error(error)
    if sys.stdin.isatty():
        print(_example_line(str(session.fields["model"]), example))
    return _run_interactive(send)


def _example_line(model: str, example: str) -> str:
    """Return a line with a text to try; the demonstration models of the package continue code."""
    if model == "demo" or model.startswith("demo/"):
        return f"{model} continues Python source; try: {CODE}"
    return f"model {model}; try: {example}"


def _run_interactive(send: Callable[[str], Any]) -> int:
    """Read lines and send them until the end of the input; an error answer does not end the loop."""
    status = 0
    while True:
        try:
            text = input("> ")
        except (EOFError, KeyboardInterrupt):
            print()
            return status
        try:
            asyncio.run(send(text))
        except KeyboardInterrupt:
            print("(stopped)")
        except ServerError as error:
            status = _print_error(error)
        except UnreachableError as error:
            return _print_error(error)


def _print_error(error: Exception) -> int:
    print(f"fastdeploy: error: {error}", file=sys.stderr)
    return 1
