# SPDX-License-Identifier: Apache-2.0
"""`fastdeploy chat` and `fastdeploy complete`: small clients of a running server."""

from __future__ import annotations

import argparse
import json
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

DEFAULT_URL = "http://localhost:8000/v1"


class ServerError(Exception):
    """The server cannot be reached, or has answered with an error."""


@dataclass
class Client:
    """A server, and the parameters of every request to it."""

    url: str
    api_key: str
    parameters: dict[str, Any]

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the choices of a streamed answer.

        Raises:
            ServerError: no connection, or an error answer or event.
        """
        with self._open(path, {**self.parameters, **body, "stream": True}) as answer:
            for line in answer:
                data = line.decode().removeprefix("data: ").strip()
                if not data or data == "[DONE]":
                    continue
                event = json.loads(data)
                if "error" in event:
                    raise ServerError(event["error"]["message"])
                yield from event["choices"]

    def first_model(self) -> str:
        """Return the name of the model that the server has."""
        with self._open("/models") as answer:
            return str(json.load(answer)["data"][0]["id"])

    def _open(self, path: str, body: dict[str, Any] | None = None) -> Any:
        headers = {"Authorization": f"Bearer {self.api_key}", "Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        try:
            return urllib.request.urlopen(urllib.request.Request(self.url + path, data, headers))
        except urllib.error.HTTPError as error:
            raise ServerError(_message(error.read()) or str(error)) from None
        except (urllib.error.URLError, OSError, ValueError) as error:
            raise ServerError(f"cannot reach {self.url}: {getattr(error, 'reason', error)}") from None


def chat(arguments: list[str]) -> int:
    """Talk to the model; with --quick one message, else a conversation until the input ends."""
    parser = _parser("chat", "MESSAGE", "send one message and exit")
    parser.add_argument("--system-prompt", help="first message of the conversation")
    args = parser.parse_args(arguments)
    messages: list[dict[str, str]] = []
    if args.system_prompt:
        messages.append({"role": "system", "content": args.system_prompt})

    def turn(client: Client, text: str) -> None:
        messages.append({"role": "user", "content": text})
        pieces = []
        for choice in client.stream("/chat/completions", {"messages": messages}):
            pieces.append(choice["delta"].get("content") or "")
            print(pieces[-1], end="", flush=True)
        print()
        messages.append({"role": "assistant", "content": "".join(pieces)})

    return _converse(args, turn)


def complete(arguments: list[str]) -> int:
    """Let the model continue texts; with --quick one, else one per line until the input ends."""
    args = _parser("complete", "PROMPT", "continue one text and exit").parse_args(arguments)

    def turn(client: Client, text: str) -> None:
        for choice in client.stream("/completions", {"prompt": text}):
            print(choice["text"], end="", flush=True)
        print()

    return _converse(args, turn)


def _parser(command: str, quick: str, help_quick: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"fastdeploy {command}")
    parser.add_argument("--url", default=DEFAULT_URL, help=f"address of the server (default: {DEFAULT_URL})")
    parser.add_argument("--model-name", help="model to ask for (default: the first that the server has)")
    parser.add_argument("--api-key", default="EMPTY", help="key of the server")
    parser.add_argument("-q", "--quick", metavar=quick, help=help_quick)
    parser.add_argument("--max-tokens", type=int, default=512, help="most tokens of an answer (default: 512)")
    parser.add_argument("--temperature", type=float, help="0 is greedy (default: the server's)")
    return parser


def _converse(args: argparse.Namespace, turn: Any) -> int:
    parameters = {"max_tokens": args.max_tokens}
    if args.temperature is not None:
        parameters["temperature"] = args.temperature
    client = Client(args.url.rstrip("/"), args.api_key, parameters)
    try:
        client.parameters["model"] = args.model_name or client.first_model()
        if args.quick is not None:
            turn(client, args.quick)
            return 0
        while True:
            turn(client, input("> "))
    except ServerError as error:
        print(f"fastdeploy: error: {error}", file=sys.stderr)
        return 1
    except (EOFError, KeyboardInterrupt):
        print()
        return 0


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return ""
