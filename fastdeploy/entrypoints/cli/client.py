# SPDX-License-Identifier: Apache-2.0
"""`fastdeploy chat` and `fastdeploy complete`: small clients of a running server."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fastdeploy.config.env import read_env
from fastdeploy.entrypoints.cli.http_client import HttpClient, ServerError, UnreachableError
from fastdeploy.entrypoints.cli.origin_view import ASKED, OriginView
from fastdeploy.entrypoints.cli.parser import CommandParser, positive_int

DEFAULT_URL = "http://localhost:8000/v1"
DIM, PLAIN = "\033[2m", "\033[0m"


class Printer:
    """Writes an answer as it comes; reasoning stands dim on a terminal, between marks elsewhere."""

    def __init__(self) -> None:
        is_dim = sys.stdout.isatty() and not read_env().no_color
        self._begin, self._end = (DIM, PLAIN + "\n") if is_dim else ("[reasoning] ", "\n[answer] ")
        self._is_reasoning = False

    def show(self, choice: Mapping[str, Any], text: str, reasoning: str) -> None:
        """Write what is new of a choice."""
        self._write(reasoning, is_reasoning=True)
        self._write(text, is_reasoning=False)

    def _write(self, text: str, is_reasoning: bool) -> None:
        if not text:
            return
        if is_reasoning != self._is_reasoning:
            print(self._begin if is_reasoning else self._end, end="")
            self._is_reasoning = is_reasoning
        print(text, end="", flush=True)

    def end(self) -> None:
        """End the answer with a new line."""
        print(PLAIN if self._is_reasoning and self._begin == DIM else "")
        self._is_reasoning = False


class OriginPrinter:
    """Writes an answer token by token with `OriginView`, reasoning and special tokens included."""

    def __init__(self) -> None:
        self._view = OriginView()
        self._metrics: Mapping[str, Any] | None = None
        self._untold = ""

    def show(self, choice: Mapping[str, Any], text: str, reasoning: str) -> None:
        """Write what is new of a choice."""
        tokens = choice.get("tokens")
        self._untold = self._untold + reasoning + text if tokens is None else ""
        self._view.write(tokens or ())
        self._metrics = choice.get("speculate_metrics") or self._metrics

    def end(self) -> None:
        """End the answer with the figures, or with the text, if the server does not tell where tokens come from."""
        self._view.end(self._metrics)
        if self._untold:
            print(f"{self._untold}\n(this server does not tell where its tokens come from)")


@dataclass
class Conversation:
    """The server, what every request carries, and the messages so far.

    Attributes:
        is_verbose: show where each token came from.
    """

    client: HttpClient
    parameters: dict[str, Any]
    is_verbose: bool = False
    messages: list[dict[str, str]] = field(default_factory=list)

    async def say(self, text: str) -> None:
        """Send a message and print the answer; both are remembered if there was one, as far as it came."""
        self.messages.append({"role": "user", "content": text})
        printer, answer = self._printer(), ""
        body = {**self.parameters, "messages": self.messages, "stream": True}
        try:
            async for event in self.client.stream("/chat/completions", body):
                for choice in event["choices"]:
                    piece = choice["delta"].get("content") or ""
                    printer.show(choice, piece, choice["delta"].get("reasoning_content") or "")
                    answer += piece
        except (ServerError, UnreachableError):
            answer = ""
            raise
        finally:
            printer.end()
            if answer:
                self.messages.append({"role": "assistant", "content": answer})
            else:
                self.messages.pop()

    async def complete(self, text: str) -> None:
        """Print the continuation of a text."""
        printer = self._printer()
        try:
            async for event in self.client.stream("/completions", {**self.parameters, "prompt": text, "stream": True}):
                for choice in event["choices"]:
                    printer.show(choice, choice["text"], "")
        finally:
            printer.end()

    def _printer(self) -> Printer | OriginPrinter:
        return OriginPrinter() if self.is_verbose else Printer()


def chat(arguments: list[str]) -> int:
    """Talk to the model; with --quick one message, else a conversation until the input ends."""
    parser = _parser("chat", "Talk to a running server. Ctrl-C stops an answer, Ctrl-D ends the conversation.")
    parser.add_argument("-q", "--quick", metavar="MESSAGE", help="send one message and exit")
    parser.add_argument("--system-prompt", help="first message of the conversation")
    args = parser.parse_own(arguments)
    conversation = _conversation(args)
    if args.system_prompt:
        conversation.messages.append({"role": "system", "content": args.system_prompt})
    return _converse(args, conversation, conversation.say)


def complete(arguments: list[str]) -> int:
    """Let the model continue texts; with --quick one, else one per line until the input ends."""
    parser = _parser("complete", "Let a running server continue texts, one per line.")
    parser.add_argument("-q", "--quick", metavar="PROMPT", help="continue one text and exit")
    args = parser.parse_own(arguments)
    conversation = _conversation(args)
    return _converse(args, conversation, conversation.complete)


def add_key_flag(parser: argparse.ArgumentParser) -> None:
    """Add the flag that brings the key of a server."""
    parser.add_argument("--api-key", help="key of the server; else OPENAI_API_KEY of the environment")


def server_key(args: argparse.Namespace) -> str:
    """Return the key to send."""
    return str(args.api_key or read_env().openai_api_key or "EMPTY")


def _parser(command: str, description: str) -> CommandParser:
    parser = CommandParser(command, description)
    parser.add_argument("--url", default=DEFAULT_URL, help="address of the server")
    parser.add_argument("--model-name", help="model to ask for; else the first that the server has")
    add_key_flag(parser)
    parser.add_argument("--max-tokens", type=positive_int, default=512, help="most tokens of an answer")
    parser.add_argument("--temperature", type=float, help="0 is greedy; else the server's")
    parser.add_argument(
        "--verbose", action="store_true", help="colour each token by what proposed it, and end with figures"
    )
    return parser


def _conversation(args: argparse.Namespace) -> Conversation:
    parameters: dict[str, Any] = {"max_tokens": args.max_tokens, **(ASKED if args.verbose else {})}
    if args.temperature is not None:
        parameters["temperature"] = args.temperature
    return Conversation(HttpClient(args.url.rstrip("/"), server_key(args)), parameters, args.verbose)


def _converse(args: argparse.Namespace, conversation: Conversation, turn: Callable[[str], Any]) -> int:
    try:
        conversation.parameters["model"] = args.model_name or asyncio.run(conversation.client.first_model())
        if args.quick is not None:
            asyncio.run(turn(args.quick))
            return 0
    except (ServerError, UnreachableError) as error:
        return _failed(error)
    return _take_turns(turn)


def _take_turns(turn: Callable[[str], Any]) -> int:
    """Ask for lines until the input ends; an error answer is said, and the next line asked for."""
    status = 0
    while True:
        try:
            text = input("> ")
        except (EOFError, KeyboardInterrupt):
            print()
            return status
        try:
            asyncio.run(turn(text))
        except KeyboardInterrupt:
            print("(stopped)")
        except ServerError as error:
            status = _failed(error)
        except UnreachableError as error:
            return _failed(error)


def _failed(error: Exception) -> int:
    print(f"fastdeploy: error: {error}", file=sys.stderr)
    return 1
