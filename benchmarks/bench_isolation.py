# SPDX-License-Identifier: Apache-2.0
"""How much does a client with harmful requests delay another client?

    python -m benchmarks.bench_isolation [--shape benchmarks/shapes/qwen3-0.6b] [--attacks sequences grammar ...]

A server of the shape with random weights has two API keys. The greedy client sends the requests of one attack again and
again, from several connections; the polite client streams one completion after the other, and a third one asks /health.
The baseline is the same with ordinary requests of the greedy client, of as many sequences. Columns, per attack:

    itl_ratio      99th percentile of the polite client's time between tokens, over that of the baseline
    ttft_steps     its time to the first token, less that of the prompt alone, in times between tokens (90th percentile)
    health_s       the longest answer of /health
    statuses       how the greedy client's requests ended

After all attacks the server gets SIGTERM while one of each runs; `stop_s` is the time until it has ended.
"""

from __future__ import annotations

import http.client
import itertools
import json
import shutil
import socket
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.bench_http import Server, percentiles, serving
from benchmarks.report import Row, make_parser, print_report
from benchmarks.shape_engine import SHAPE
from fastdeploy.hub.model_path import resolve_model_path

POLITE, GREEDY = "polite-key", "greedy-key"
MODEL_LEN = 4096
KV_CACHE_BYTES = 4 << 30
CONNECTIONS = 8  # of the greedy client
NUM_TOKENS = 48  # of each stream of the polite client
SHUTDOWN_S = 10
WARM_UP_S = 4.0  # until the first prompts of an attack are computed, which begin with a long step
PROMPT = list(range(100, 164))
WORD = "a" * 1000
_seeds = itertools.count(1)


@dataclass(frozen=True)
class Attack:
    """Requests of one class: `body` makes the next one, which runs `num_sequences` sequences in the engine.

    Large ones are all the same, because making them would take the processor from the server.
    """

    path: str
    body: Callable[[], Any]
    num_sequences: int = 1
    is_large: bool = False

    def content(self) -> bytes:
        """Return the next body as JSON."""
        return _large_content(self.path, self.body) if self.is_large else json.dumps(self.body()).encode()


@cache
def _large_content(path: str, body: Callable[[], Any]) -> bytes:
    return json.dumps(body()).encode()


def completion(**fields: Any) -> dict[str, Any]:
    """Return the body of a completion that runs until `max_tokens`."""
    return {"prompt": PROMPT, "max_tokens": 256, "ignore_eos": True, "temperature": 0, **fields}


def never_compiling() -> dict[str, Any]:
    """Return a completion whose grammar has not been seen before and takes too long to compile."""
    factor = (1 << 24) + 2 * next(_seeds) + 1
    schema = {"allOf": [{"type": "integer", "multipleOf": factor}, {"type": "integer", "multipleOf": 65_521}]}
    return completion(guided_json=schema)


def many_stops() -> dict[str, Any]:
    """Return a completion with as many and as long stop strings as are allowed, which almost match."""
    return completion(n=16, stop=["a" * 1023 + chr(98 + k) for k in range(16)])


def many_bad_words() -> dict[str, Any]:
    """Return a completion with as many ids of bad words as are allowed."""
    return completion(bad_words_token_ids=[[7] * k + [8] for k in range(1, 175)])


def expensive_template() -> dict[str, Any]:
    """Return a conversation whose template runs for as long as it may."""
    template = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    return {"messages": [{"role": "user", "content": "x"}], "chat_template": template, "max_tokens": 1}


def new_prompt(num_tokens: int) -> list[int]:
    """Return a prompt that no cache holds."""
    return [next(_seeds) % 4000 + 10, next(_seeds) // 4000 + 10, *range(10, num_tokens + 8)]


ATTACKS = {
    "ordinary": Attack("/v1/completions", completion),
    "sequences": Attack("/v1/completions", lambda: completion(n=128), 128),
    "many prompts": Attack("/v1/completions", lambda: completion(prompt=[PROMPT] * 8, n=8), 64),
    "long prompts": Attack("/v1/completions", lambda: completion(prompt=new_prompt(MODEL_LEN - 8), max_tokens=1)),
    "prompt_logprobs": Attack(
        "/v1/completions", lambda: completion(prompt=new_prompt(2000), prompt_logprobs=20, n=64, max_tokens=1), 64
    ),
    "grammar": Attack("/v1/completions", never_compiling),
    "stop strings": Attack("/v1/completions", many_stops, 16),
    "bad words": Attack("/v1/completions", many_bad_words),
    "template": Attack("/v1/chat/completions", expensive_template),
    "tokenize": Attack("/tokenize", lambda: {"prompt": WORD * 8000}, is_large=True),
    "elements": Attack("/v1/completions", lambda: completion(logit_bias=[[]] * 5_000_000), is_large=True),
    "priority": Attack("/v1/completions", lambda: completion(priority=-(2**31), n=64), 64),
}


class Client:
    """Sends requests of one attack again and again, from `CONNECTIONS` threads, while the block runs."""

    def __init__(self, server: Server, attack: Attack) -> None:
        self.statuses: Counter[int | str] = Counter()
        self._server, self._attack = server, attack
        self._stop = threading.Event()
        self._open: set[http.client.HTTPConnection] = set()
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(CONNECTIONS)]

    def __enter__(self) -> Client:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        for connection in list(self._open):  # the server aborts what is running
            if connection.sock is not None:
                connection.sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            content = self._attack.content()
            connection = http.client.HTTPConnection(self._server.host, self._server.port)
            self._open.add(connection)
            try:
                status: int | str = request(connection, "POST", self._attack.path, content, GREEDY)
            except (OSError, http.client.HTTPException) as error:
                status = type(error).__name__
            finally:
                self._open.discard(connection)
                connection.close()
            if not self._stop.is_set():
                self.statuses[status] += 1
            self._stop.wait(0.05 if status in (429, 503) else 0)


class HealthClient(threading.Thread):
    """Asks /health again and again; `longest_s` is the longest answer."""

    def __init__(self, server: Server) -> None:
        super().__init__(daemon=True)
        self.longest_s = 0.0
        self._server = server
        self._stop_event = threading.Event()
        self.start()

    def run(self) -> None:
        """Measure until `stop`."""
        is_stopping = False
        while not is_stopping:
            begin = time.perf_counter()
            connection = http.client.HTTPConnection(self._server.host, self._server.port, timeout=60)
            assert request(connection, "GET", "/health") == 200
            connection.close()
            self.longest_s = max(self.longest_s, time.perf_counter() - begin)
            is_stopping = self._stop_event.wait(0.1)

    def stop(self) -> float:
        """Stop; return the longest answer in seconds."""
        self._stop_event.set()
        self.join()
        return self.longest_s


def request(connection: http.client.HTTPConnection, method: str, path: str, content: bytes = b"", key: str = "") -> int:
    """Send a request and read its answer; return the status."""
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    connection.request(method, path, content, headers)
    response = connection.getresponse()
    response.read()
    return response.status


def polite_times(server: Server, num_streams: int) -> list[list[float]]:
    """Stream completions one after the other; return the seconds at which the tokens of each arrived."""
    bodies = [completion(prompt=new_prompt(64), max_tokens=NUM_TOKENS) for _ in range(num_streams)]
    return [server.stream_bodies([body], POLITE)[0]["times"] for body in bodies]


def measure(server: Server, attack: Attack, num_streams: int) -> Row:
    """Measure the polite client beside an attack."""
    with Client(server, attack) as greedy:
        time.sleep(WARM_UP_S)
        health = HealthClient(server)
        streams = polite_times(server, num_streams)
        longest_s = health.stop()
    gaps = [after - before for times in streams for before, after in itertools.pairwise(times)]
    statuses = " ".join(f"{status}: {count}" for status, count in greedy.statuses.most_common())
    return {
        "ttft_s": max(times[0] for times in streams),
        "step_s": sorted(gaps)[len(gaps) * 9 // 10],
        **percentiles("itl_ms", gaps),
        "health_s": longest_s,
        "statuses": statuses or "none ended",
    }


def compare(server: Server, attack: Attack, num_streams: int, prompt_s: float) -> Row:
    """Measure an attack and as many ordinary sequences."""
    attacked = measure(server, attack, num_streams)
    fields = {"n": attack.num_sequences} if attack.num_sequences > 1 else {}
    baseline = measure(
        server, Attack("/v1/completions", lambda: completion(**fields), attack.num_sequences), num_streams
    )
    return {
        "itl_ratio": attacked["itl_ms_p99"] / baseline["itl_ms_p99"],
        "itl_ms_p99": attacked["itl_ms_p99"],
        "ordinary_p99": baseline["itl_ms_p99"],
        "ttft_steps": max(0.0, attacked["ttft_s"] - prompt_s) / attacked["step_s"],
        "ordinary_steps": max(0.0, baseline["ttft_s"] - prompt_s) / baseline["step_s"],
        "health_s": attacked["health_s"],
        "statuses": attacked["statuses"],
    }


def stop_seconds(server: Server) -> float:
    """Send SIGTERM while every attack runs; return the seconds until the server has ended."""
    with ExitStack() as stack:
        for attack in ATTACKS.values():
            stack.enter_context(Client(server, attack))
        time.sleep(2.0)
        begin = time.perf_counter()
        server.process.terminate()
        server.process.wait(SHUTDOWN_S + 30)
        return time.perf_counter() - begin


def make_model(shape: Path, folder: Path) -> Path:
    """Return a folder with the configuration of the shape and the tokenizer of the demonstration model."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(resolve_model_path("demo")) / name, folder / name)
    shutil.copy(shape / "config.json", folder / "config.json")
    return folder


def main() -> None:
    """Print one row per attack and one JSON line."""
    parser = make_parser(__doc__)
    parser.add_argument("--shape", type=Path, default=Path(SHAPE))
    parser.add_argument("--quantization", default="w4a8")
    parser.add_argument("--attacks", nargs="+", choices=list(ATTACKS), default=list(ATTACKS))
    parser.add_argument("--streams", type=int, default=4, help="streams of the polite client per attack")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        keys = Path(scratch) / "keys.yaml"
        keys.write_text(f"- {{name: polite, key: {POLITE}}}\n- {{name: greedy, key: {GREEDY}}}\n")
        keys.chmod(0o600)
        (folder := Path(scratch) / "model").mkdir()
        flags = ["--load-choices", "dummy", "--quantization", args.quantization, "--max-model-len", str(MODEL_LEN)]
        flags += ["--kv-cache-memory", str(KV_CACHE_BYTES), "--timeout-graceful-shutdown", str(SHUTDOWN_S)]
        flags += ["--api-key-file", str(keys), "--disable-log-requests"]
        with serving([str(make_model(args.shape, folder)), *flags]) as server:
            prompt_s = statistics.median(times[0] for times in polite_times(server, 3))
            rows = [{"attack": name, **compare(server, ATTACKS[name], args.streams, prompt_s)} for name in args.attacks]
            stop_s = stop_seconds(server)
    print_report("isolation", f"polite client beside attacks; SIGTERM took {stop_s:.1f} s", rows, stop_s=stop_s)


if __name__ == "__main__":
    main()
