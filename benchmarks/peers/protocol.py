# SPDX-License-Identifier: Apache-2.0
"""How does compare.py talk to an engine? A worker loads one engine, then runs jobs that come as JSON lines on stdin.

A job is {"requests": N, "prompt_tokens": P, "new_tokens": T, "rows": R, "limit_s": L}. Each decoding step computes R
rows per request and emits one token. The answer has the seconds until every request had its first token and until the
end, and the number of steps in between: T - 1, or fewer if decoding took longer than L seconds. A worker runs one job
at a time and is idle in between. It runs without this repository's package.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable
from typing import Any

NUM_THREADS = int(os.environ.get("PEERS_THREADS", "2"))
# On a shared machine use one thread and PEERS_CLOCK=cpu, the processor time of the worker.
clock = time.process_time if os.environ.get("PEERS_CLOCK") == "cpu" else time.perf_counter
TOKENS = range(256, 4096)  # of prompts: in all vocabularies, special in none


class Decoding:
    """The progress of a job: its start, the first token of every request, and each step after that.

    Attributes:
        first_s: seconds until every request had its first token; 0 before.
        total_s: seconds until the last step so far.
        num_steps: steps after the first tokens.
    """

    def __init__(self, limit_s: float) -> None:
        """Start the job, whose decoding stops after `limit_s` seconds of wall time."""
        self.first_s = self.total_s = 0.0
        self.num_steps = 0
        self._limit_s, self._begin, self._decoding_since = limit_s, clock(), 0.0

    def begin(self) -> None:
        """Record that every request has its first token."""
        self.first_s = self.total_s = clock() - self._begin
        self._decoding_since = time.perf_counter()

    def step(self) -> None:
        """Record that every request has one more token."""
        self.num_steps += 1
        self.total_s = clock() - self._begin

    @property
    def is_over(self) -> bool:
        """Whether the limit has been reached, after at least one step."""
        return self.num_steps > 0 and time.perf_counter() - self._decoding_since >= self._limit_s


# Runs prompts of token ids to `new_tokens` tokens each, or until the decoding is over, in steps of `rows` rows each.
Run = Callable[[list[list[int]], int, int, Decoding], None]
Message = dict[str, Any]


def answer_jobs(ready: Message, answer: Callable[[Message], Message]) -> None:
    """Report that the engine is loaded, then answer jobs until stdin ends. Other output goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    print(json.dumps(ready), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=answers, flush=True)


def serve(describe: str, run: Run) -> None:
    """Time the jobs of compare.py until stdin ends."""
    rng = random.Random(os.getpid())

    def answer(job: Message) -> Message:
        prompts = [rng.choices(TOKENS, k=job["prompt_tokens"]) for _ in range(job["requests"])]
        decoding = Decoding(job["limit_s"])
        run(prompts, job["new_tokens"], job["rows"], decoding)
        return {key: getattr(decoding, key) for key in ("first_s", "total_s", "num_steps")}

    answer_jobs({"ready": describe}, answer)
