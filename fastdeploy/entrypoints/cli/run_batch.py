# SPDX-License-Identifier: Apache-2.0
"""`fastdeploy run-batch`: answers a file of requests in OpenAI's batch format, on a private or a running server.

Answers are written in the order of the requests to `OUT.part`, which is renamed to `OUT` when it is complete. An `OUT`
that exists and is no regular file, such as a pipe or /dev/stdout, is written directly.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import secrets
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from tqdm import tqdm

from fastdeploy.config.args import ServeArgs, parse_serve_args
from fastdeploy.config.env import API_KEY_VARIABLE, read_env
from fastdeploy.core.child_command import child_command
from fastdeploy.core.errors import ConfigError, InvalidRequestError
from fastdeploy.core.json_types import check_json, shorten
from fastdeploy.entrypoints.cli.http_client import HttpClient, UnreachableError, error_message
from fastdeploy.entrypoints.cli.parser import (
    SERVE_FLAGS,
    CommandParser,
    add_api_key_flag,
    get_api_key,
    positive_int,
    server_url,
)

PATHS = {
    "/v1/chat/completions": "/chat/completions",
    "/v1/completions": "/completions",
    "/v1/responses": "/responses",
    "/v1/messages": "/messages",
}
KEYS = {"custom_id", "method", "url", "body"}
TOO_MANY_REQUESTS, UNAVAILABLE = 429, 503
NETWORK_FLAGS = (
    "host",
    "port",
    "uds",
    "api_key",
    "api_key_file",
    "metrics_port",
    "root_path",
    "ssl_keyfile",
    "ssl_certfile",
)
READY_LINE = re.compile(r"Ready: (\S+) ")
STOP_TIMEOUT_S = 30
MESSAGES_USAGE = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens", "output_tokens")
MAX_MESSAGE = 200  # characters of the error in the last line
MAX_LINKS = 40  # of a path, as in the kernel


@dataclass(frozen=True)
class BatchRequest:
    """One line of the input; `error` says why it cannot be sent."""

    custom_id: str
    path: str = ""
    body: Any = None
    error: str = ""


class ServerEndedError(Exception):
    """The private server ended before it was ready.

    Attributes:
        status: its exit status.
    """

    def __init__(self, status: int) -> None:
        super().__init__(f"the server ended with status {status} before it was ready")
        self.status = status


def main(arguments: list[str]) -> int:
    """Run the batch; return 0 if the output was written and a request succeeded, or there was none."""
    args, flags = _make_parser().parse_with_engine_flags(arguments)
    requests = read_requests(args.input_file)
    output = _find_output(args)
    answers = _read_partial_answers(output.partial, requests) if args.resume else []
    num_kept = len(answers)
    try:
        if args.url:
            if flags:
                raise ConfigError(flags[0], "not allowed with --url, which names a running server")
            client = HttpClient(f"{args.url}/v1", get_api_key(args))
            run_s = asyncio.run(_run(client, requests, answers, args, output))
        else:
            parsed = parse_serve_args(flags, read_env())
            _refuse_network_flags(parsed)
            args.concurrency = min(args.concurrency, parsed.server.max_concurrency)
            with private_server(flags) as client:
                run_s = asyncio.run(_run(client, requests, answers, args, output))
    except (UnreachableError, ServerEndedError) as error:
        print(f"fastdeploy: error: {error}; run again with --resume to continue", file=sys.stderr)
        return error.status if isinstance(error, ServerEndedError) else 1
    num_succeeded = sum(_has_succeeded(answer) for answer in answers)
    counts = f"{num_succeeded} of {len(requests)} requests succeeded, {len(requests) - num_succeeded} failed"
    speed = f"{sum(map(_num_tokens, answers[num_kept:]))} tokens in {run_s:.1f} s"
    print(f"{counts}; {speed}; answers in {args.output_file}{_commonest_error(answers)}", file=sys.stderr)
    return 0 if num_succeeded or not requests else 1


def read_requests(path: str) -> list[BatchRequest]:
    """Read the input; a request that cannot be sent gets an error.

    Raises:
        ConfigError: the file cannot be read, or a custom_id is missing or not unique.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("--input-file", f"cannot read {path!r}: {getattr(error, 'strerror', error)}") from None
    requests, line_numbers = [], dict[str, int]()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        request = _parse_line(line, f"{path}, line {number}")
        if request.custom_id in line_numbers:
            first = line_numbers[request.custom_id]
            raise ConfigError("custom_id", f"{request.custom_id!r} occurs in lines {first} and {number}")
        line_numbers[request.custom_id] = number
        requests.append(request)
    return requests


def _parse_line(line: str, location: str) -> BatchRequest:
    try:
        content = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(location, f"not valid JSON: {error}") from None
    if not isinstance(content, dict) or not isinstance(content.get("custom_id"), str):
        raise ConfigError(location, 'expected an object with a string "custom_id"')
    custom_id, body = content["custom_id"], content.get("body")
    if unknown := sorted(set(content) - KEYS):
        return BatchRequest(custom_id, error=f"unknown key {unknown[0]!r}; expected {', '.join(sorted(KEYS))}")
    if content.get("method") != "POST":
        return BatchRequest(custom_id, error=f"method: expected 'POST', got {shorten(content.get('method'))}")
    if not isinstance(content.get("url"), str) or content["url"] not in PATHS:
        return BatchRequest(
            custom_id, error=f"url: expected one of {', '.join(PATHS)}, got {shorten(content.get('url'))}"
        )
    if not isinstance(body, dict):
        return BatchRequest(custom_id, error="body: expected an object")
    try:
        check_json("body", body)
    except InvalidRequestError as error:
        return BatchRequest(custom_id, error=str(error))
    if body.get("stream"):
        return BatchRequest(custom_id, error="body.stream: streaming is not supported in batches")
    return BatchRequest(custom_id, PATHS[content["url"]], body)


def _make_parser() -> CommandParser:
    parser = CommandParser(
        "run-batch",
        "Answer a file of requests in OpenAI's batch format, on a server that this command starts or on a running one.",
        SERVE_FLAGS,
    )
    parser.add_argument("-i", "--input-file", required=True, help="JSONL with custom_id, method, url, body")
    parser.add_argument("-o", "--output-file", required=True, help="JSONL with id, custom_id, response, error")
    parser.add_argument(
        "--url",
        type=server_url,
        help="running server, such as http://localhost:8000, with or without /v1; default: start a private server",
    )
    add_api_key_flag(parser)
    parser.add_argument("--concurrency", type=positive_int, default=256, help="maximum number of requests in flight")
    parser.add_argument("--resume", action="store_true", help="continue an interrupted run, keeping its answers")
    return parser


@dataclass(frozen=True)
class _Output:
    """Where the answers are written.

    Attributes:
        path: the output without symbolic links, which are kept.
        is_direct: answers are written to `path` as they arrive, because it cannot be replaced.
    """

    path: Path
    is_direct: bool

    @property
    def partial(self) -> Path:
        """Return the file that grows until all answers are there."""
        return self.path if self.is_direct else self.path.with_name(self.path.name + ".part")


def _find_output(args: argparse.Namespace) -> _Output:
    """Return where to write.

    Raises:
        ConfigError: --resume is given, but the output does not keep answers.
    """
    is_other_kind = os.path.exists(args.output_file) and not os.path.isfile(args.output_file)
    is_direct = is_other_kind or _is_descriptor(args.output_file)
    if is_direct and args.resume:
        raise ConfigError("--resume", f"not possible for {args.output_file!r}, which is no regular file")
    return _Output(Path(args.output_file if is_direct else os.path.realpath(args.output_file)), is_direct)


def _is_descriptor(path: str) -> bool:
    """Return whether a path leads to an open file of this process, such as /dev/stdout or /dev/fd/3."""
    for _ in range(MAX_LINKS):
        if os.path.realpath(os.path.dirname(path)).startswith("/proc/"):
            return True
        if not os.path.islink(path):
            return False
        path = os.path.join(os.path.dirname(path), os.readlink(path))
    return False


def _read_partial_answers(file: Path, requests: Sequence[BatchRequest]) -> list[dict[str, Any]]:
    """Return the answers of an interrupted run, if there was one; truncate the file after its last whole line.

    Raises:
        ConfigError: they are not the answers to the first requests of this input.
    """
    if not file.exists():
        return []
    *lines, incomplete = file.read_bytes().split(b"\n")
    answers = [json.loads(line) for line in lines]
    if [answer["custom_id"] for answer in answers] != [request.custom_id for request in requests[: len(answers)]]:
        raise ConfigError("--resume", f"{file} has the answers to a different input; delete it to start over")
    os.truncate(file, file.stat().st_size - len(incomplete))
    return answers


async def _run(
    client: HttpClient,
    requests: Sequence[BatchRequest],
    answers: list[dict[str, Any]],
    args: argparse.Namespace,
    output: _Output,
) -> float:
    """Send the requests that have no answer yet, add their answers to `answers` and write the file; return its time."""
    num_done, start_s = len(answers), time.perf_counter()
    try:
        with (
            output.partial.open("a" if num_done or output.is_direct else "w", encoding="utf-8") as file,
            tqdm(total=len(requests), initial=num_done) as bar,
        ):
            async for answer in _send_all(client, requests[num_done:], args.concurrency):
                file.write(json.dumps(answer) + "\n")
                file.flush()
                answers.append(answer)
                bar.update()
        if not output.is_direct:
            output.partial.replace(output.path)
    except OSError as error:
        raise ConfigError("--output-file", f"cannot write {args.output_file!r}: {error.strerror}") from None
    return time.perf_counter() - start_s


async def _send_all(
    client: HttpClient, requests: Sequence[BatchRequest], concurrency: int
) -> AsyncIterator[dict[str, Any]]:
    """Yield the answers in the order of the requests, of which `concurrency` are in flight."""
    semaphore = asyncio.Semaphore(concurrency)

    async def send(request: BatchRequest) -> dict[str, Any]:
        async with semaphore:
            return await _send(client, request)

    tasks = [asyncio.create_task(send(request)) for request in requests]
    try:
        for task in tasks:
            yield await task
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _send(client: HttpClient, request: BatchRequest) -> dict[str, Any]:
    answer: dict[str, Any] = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": request.custom_id}
    if request.error:
        return {**answer, "response": None, "error": {"code": "invalid_request", "message": request.error}}
    status, headers, content = await client.post(request.path, request.body)
    while status == TOO_MANY_REQUESTS:
        await asyncio.sleep(float(headers.get("retry-after", 1)))
        status, headers, content = await client.post(request.path, request.body)
    if status == UNAVAILABLE:  # a failure of the server, which the remaining requests would meet as well
        raise UnreachableError(error_message(content) or f"status {status}")
    response = {
        "status_code": status,
        "request_id": headers.get("x-request-id", ""),
        "body": json.loads(content),
    }
    return {**answer, "response": response, "error": None}


def _has_succeeded(answer: dict[str, Any]) -> bool:
    return answer["response"] is not None and answer["response"]["status_code"] == 200


def _num_tokens(answer: dict[str, Any]) -> int:
    """Return the tokens of prompt and output, which each of the protocols counts in its own way."""
    usage = answer["response"]["body"].get("usage") if _has_succeeded(answer) else None
    if not usage:
        return 0
    total: int | None = usage.get("total_tokens")
    return sum(usage.get(name) or 0 for name in MESSAGES_USAGE) if total is None else total


def _commonest_error(answers: Sequence[dict[str, Any]]) -> str:
    """Return the end of the last line: the commonest message of the requests that failed, if any has."""
    failed = [answer for answer in answers if not _has_succeeded(answer)]
    if not failed:
        return ""
    messages = Counter(_message(answer) for answer in failed)
    message, count = messages.most_common(1)[0]
    return f"; commonest error ({count} of {len(failed)}): {message}"


def _message(answer: dict[str, Any]) -> str:
    """Return why a request failed, as one short line."""
    if answer["error"]:
        message = answer["error"]["message"]
    else:
        response = answer["response"]
        message = error_message(json.dumps(response["body"]).encode()) or f"status {response['status_code']}"
    return " ".join(message.split())[:MAX_MESSAGE]


@contextlib.contextmanager
def private_server(flags: Sequence[str]) -> Iterator[HttpClient]:
    """Run `fastdeploy serve` on a free local port with a random API key; its output goes to stderr.

    Raises:
        ServerEndedError: it ended before it was ready; stderr has the reason.
    """
    key = secrets.token_hex(16)
    command = child_command("fastdeploy.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", "0")
    environment = {**os.environ, API_KEY_VARIABLE: key}
    process = subprocess.Popen([*command, *flags], stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        yield HttpClient(_wait_until_ready(process, process.stdout), key)
    finally:
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _refuse_network_flags(args: ServeArgs) -> None:
    refused = (*NETWORK_FLAGS, "scheduler_name") if args.cluster.is_clustered else NETWORK_FLAGS
    for name, origin in args.provenance.items():
        if name in refused and origin != API_KEY_VARIABLE:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(flag, "not allowed for a private server; use --url for a running one")


def _wait_until_ready(process: subprocess.Popen[str], output: IO[str]) -> str:
    """Return the address from the ready line; a thread forwards the output that follows."""
    for line in output:
        print(line, end="", file=sys.stderr, flush=True)
        if found := READY_LINE.match(line):
            threading.Thread(target=_forward, args=(output,), daemon=True).start()
            return found.group(1)
    raise ServerEndedError(process.wait())


def _forward(output: IO[str]) -> None:
    for line in output:
        print(line, end="", file=sys.stderr, flush=True)
