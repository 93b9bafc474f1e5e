# SPDX-License-Identifier: Apache-2.0
"""`fastdeploy run-batch`: answers a file of requests in OpenAI's batch format, every request as a server would.

The answers are written in the order of the requests to `OUT.part`, which becomes `OUT` when all are there.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from fastdeploy.config.args import parse_serve_args
from fastdeploy.config.env import API_KEY_VARIABLE, read_env
from fastdeploy.core.errors import ConfigError
from fastdeploy.entrypoints.cli.client import add_key_flag, server_key
from fastdeploy.entrypoints.cli.http_client import HttpClient, UnreachableError, error_message
from fastdeploy.entrypoints.cli.local_server import ServerEndedError, local_server, refuse_network_flags
from fastdeploy.entrypoints.cli.parser import ENGINE_FLAGS, CommandParser, positive_int

PATHS = {"/v1/chat/completions": "/chat/completions", "/v1/completions": "/completions"}
KEYS = {"custom_id", "method", "url", "body"}
BUSY, UNAVAILABLE = 429, 503


@dataclass(frozen=True)
class BatchLine:
    """One line of the input; `error` says why it cannot be sent."""

    custom_id: str
    path: str = ""
    body: Any = None
    error: str = ""


def main(arguments: list[str]) -> int:
    """Run the batch; return 0 if every request was answered with status 200, else 1."""
    parser = _parser()
    args, flags = parser.parse_with_engine_flags(arguments)
    lines = read_lines(args.input_file)
    done = _answers_so_far(args, lines)
    try:
        if args.url:
            if flags:
                raise ConfigError(flags[0], "is no flag for a server that runs already (--url)")
            client = HttpClient(args.url.rstrip("/"), server_key(args))
            return asyncio.run(_run(client, lines, done, args))
        parsed = parse_serve_args(flags, read_env())
        refuse_network_flags([name for name, origin in parsed.provenance.items() if origin != API_KEY_VARIABLE])
        args.concurrency = min(args.concurrency, parsed.server.max_concurrency)
        with local_server(flags) as client:
            return asyncio.run(_run(client, lines, done, args))
    except (UnreachableError, ServerEndedError) as error:
        print(f"fastdeploy: error: {error}; --resume goes on with what is done", file=sys.stderr)
        return error.status if isinstance(error, ServerEndedError) else 1


def read_lines(path: str) -> list[BatchLine]:
    """Read the input; a line that cannot be sent gets its error.

    Raises:
        ConfigError: no such file, or a custom_id that stands twice or is missing, without which an answer has no name.
    """
    try:
        texts = Path(path).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("--input-file", f"cannot read {path!r}: {getattr(error, 'strerror', error)}") from None
    lines, seen = [], dict[str, int]()
    for number, text in enumerate(texts, 1):
        if not text.strip():
            continue
        line = _parse_line(text, f"{path}, line {number}")
        if line.custom_id in seen:
            raise ConfigError("custom_id", f"{line.custom_id!r} stands in lines {seen[line.custom_id]} and {number}")
        seen[line.custom_id] = number
        lines.append(line)
    return lines


def _parse_line(text: str, where: str) -> BatchLine:
    try:
        given = json.loads(text)
    except ValueError as error:
        raise ConfigError(where, f"no JSON: {error}") from None
    if not isinstance(given, dict) or not isinstance(given.get("custom_id"), str):
        raise ConfigError(where, 'expected an object with a string "custom_id"')
    name, body = given["custom_id"], given.get("body")
    if unknown := sorted(set(given) - KEYS):
        return BatchLine(name, error=f"unknown key {unknown[0]!r}; expected {', '.join(sorted(KEYS))}")
    if given.get("method") != "POST":
        return BatchLine(name, error=f"method: expected 'POST', got {given.get('method')!r}")
    if given.get("url") not in PATHS:
        return BatchLine(name, error=f"url: expected one of {', '.join(PATHS)}, got {given.get('url')!r}")
    if not isinstance(body, dict):
        return BatchLine(name, error="body: expected an object")
    if body.get("stream"):
        return BatchLine(name, error="body.stream: a batch has no streams")
    return BatchLine(name, PATHS[given["url"]], body)


def _parser() -> CommandParser:
    parser = CommandParser(
        "run-batch",
        "Answer a file of requests (OpenAI batch JSONL): with a server of its own, or with a running one.",
        ENGINE_FLAGS,
    )
    parser.add_argument("-i", "--input-file", required=True, help="JSONL: custom_id, method, url, body")
    parser.add_argument("-o", "--output-file", required=True, help="JSONL: id, custom_id, response, error")
    parser.add_argument("--url", help="a running server, such as http://localhost:8000/v1; else one is started")
    add_key_flag(parser)
    parser.add_argument("--concurrency", type=positive_int, default=256, help="requests sent at once")
    parser.add_argument("--resume", action="store_true", help="keep the answers of a run that broke off")
    return parser


def _part(args: argparse.Namespace) -> Path:
    return Path(args.output_file + ".part")


def _answers_so_far(args: argparse.Namespace, lines: Sequence[BatchLine]) -> list[dict[str, Any]]:
    """Return the answers that a run before has written, if it is to go on; a half line is cut off.

    Raises:
        ConfigError: they are not the answers to the first lines of this input.
    """
    part = _part(args)
    if not args.resume or not part.exists():
        return []
    *whole, half = part.read_bytes().split(b"\n")
    if [json.loads(text)["custom_id"] for text in whole] != [line.custom_id for line in lines[: len(whole)]]:
        raise ConfigError("--resume", f"{part} holds answers to another input; remove it to begin anew")
    os.truncate(part, part.stat().st_size - len(half))
    return [json.loads(text) for text in whole]


async def _run(
    client: HttpClient, lines: Sequence[BatchLine], done: list[dict[str, Any]], args: argparse.Namespace
) -> int:
    """Write the answers that are missing; return the exit status."""
    part, answers = _part(args), list(done)
    try:
        with (
            part.open("a" if done else "w", encoding="utf-8") as output,
            tqdm(total=len(lines), initial=len(done)) as bar,
        ):
            async for answer in _answers(client, lines[len(done) :], args.concurrency):
                output.write(json.dumps(answer) + "\n")
                output.flush()
                answers.append(answer)
                bar.update()
        part.replace(args.output_file)
    except OSError as error:
        raise ConfigError("--output-file", f"cannot write {args.output_file!r}: {error.strerror}") from None
    num_good = sum(_is_good(answer) for answer in answers)
    print(f"{num_good} of {len(lines)} requests answered in {args.output_file}", file=sys.stderr)
    return 0 if num_good == len(lines) else 1


async def _answers(client: HttpClient, lines: Sequence[BatchLine], concurrency: int) -> AsyncIterator[dict[str, Any]]:
    """Yield the answers in the order of the lines, `concurrency` of them at work."""
    places = asyncio.Semaphore(concurrency)

    async def answer(line: BatchLine) -> dict[str, Any]:
        async with places:
            return await _answer(client, line)

    tasks = [asyncio.create_task(answer(line)) for line in lines]
    try:
        for task in tasks:
            yield await task
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _answer(client: HttpClient, line: BatchLine) -> dict[str, Any]:
    made: dict[str, Any] = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": line.custom_id}
    if line.error:
        return {**made, "response": None, "error": {"code": "invalid_request", "message": line.error}}
    status, headers, content = await client.post(line.path, line.body)
    while status == BUSY:
        await asyncio.sleep(float(headers.get("retry-after", 1)))
        status, headers, content = await client.post(line.path, line.body)
    if status == UNAVAILABLE:  # not this request's fault, and the next ones would get the same
        raise UnreachableError(error_message(content) or f"status {status}")
    response = {
        "status_code": status,
        "request_id": headers.get("x-request-id", ""),
        "body": json.loads(content),
    }
    return {**made, "response": response, "error": None}


def _is_good(answer: dict[str, Any]) -> bool:
    return answer["response"] is not None and answer["response"]["status_code"] == 200
