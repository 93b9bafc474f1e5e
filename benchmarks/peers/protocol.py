# SPDX-License-Identifier: Apache-2.0
"""What a worker does: it loads one engine, then runs jobs that come as JSON lines on stdin, one at a time.

A job is {"requests": N, "prompt_tokens": P, "new_tokens": T}; the answer has the seconds until every request had its
first token, and until all had all. Between jobs a worker waits, so that another engine has the machine to itself.
Runs without this repository's package.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable

NUM_THREADS = int(os.environ.get("PEERS_THREADS", "2"))
# On a machine that others use too: one thread and PEERS_CLOCK=cpu, the processor time of the worker.
clock = time.process_time if os.environ.get("PEERS_CLOCK") == "cpu" else time.perf_counter
TOKENS = range(16, 4096)  # ids of prompts: in every vocabulary here, special in none

# Runs prompts of token ids to `new_tokens` tokens each; returns (seconds to all first tokens, seconds to the end).
Run = Callable[[list[list[int]], int], tuple[float, float]]


def serve(describe: str, run: Run) -> None:
    """Say that the engine is loaded, then run jobs until stdin ends. What else is printed goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    print(json.dumps({"ready": describe}), file=answers, flush=True)
    draw = random.Random(os.getpid())
    for line in sys.stdin:
        job = json.loads(line)
        prompts = [draw.choices(TOKENS, k=job["prompt_tokens"]) for _ in range(job["requests"])]
        first_s, total_s = run(prompts, job["new_tokens"])
        print(json.dumps({"first_s": first_s, "total_s": total_s}), file=answers, flush=True)
