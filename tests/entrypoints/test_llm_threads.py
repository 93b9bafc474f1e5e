# SPDX-License-Identifier: Apache-2.0
"""An `LLM` works in every thread, whichever thread has imported Paddle, and after that one has ended.

Each case runs in a process of its own, because the first import of Paddle decides what later threads begin with.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.entrypoints.small_llm import GOLDEN, save_small_model

SCRIPT = """
import sys
from threading import Barrier, Thread

def load():
    from fastdeploy import LLM
    return LLM(sys.argv[1], seed=1, speculative_config=sys.argv[2])

def use(llm):
    from fastdeploy import SamplingParams
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    results.append(llm.generate("abcabc", params, use_tqdm=False)[0].outputs[0].token_ids)

def in_thread(*functions):
    def run(function):
        try:
            begun.wait()
            found.append(function())
        except BaseException as error:
            errors.append(error)
    found, begun = [], Barrier(len(functions))
    threads = [Thread(target=run, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        raise error
    return found

results, errors = [], []
"""
ORDERS = {
    "a thread, then the main thread": """
(first,) = in_thread(load)
in_thread(lambda: use(first))
second = load()
use(second)
use(first)
in_thread(lambda: use(first))
""",
    "the main thread, then a thread": """
first = load()
use(first)
(second,) = in_thread(load)
in_thread(lambda: use(first))
use(second)
""",
    "two threads, one after the other": """
(first,) = in_thread(load)
(second,) = in_thread(load)
in_thread(lambda: use(first))
in_thread(lambda: use(second))
""",
    "two threads at once": """
first, second = in_thread(load, load)
in_thread(lambda: use(first), lambda: use(second), lambda: use(first), lambda: use(second))
use(first)
""",
    "a thread that imports Paddle, then the main thread": """
in_thread(lambda: __import__("paddle"))
first = load()
use(first)
in_thread(lambda: use(first))
""",
}
END = """
print(results[0], len(set(map(tuple, results))))
"""
WITH_BOTH_MODELS = ("a thread, then the main thread", "two threads at once")
MODELS = {
    "glm4_moe": {"method": "mtp", "model": str(GOLDEN / "glm4_moe_mtp"), "num_speculative_tokens": 2},
    "ernie4_5_bias": {"method": "ngram", "num_speculative_tokens": 2},
}


@pytest.mark.parametrize("order", ORDERS)
def test_models_are_loaded_and_used_in_any_order_of_threads(order: str, tmp_path: Path) -> None:
    running = {}
    for golden, speculative in list(MODELS.items())[: 2 if order in WITH_BOTH_MODELS else 1]:
        folder = tmp_path / golden
        folder.mkdir()
        arguments = [str(save_small_model(folder, golden)), json.dumps(speculative)]
        command = [sys.executable, "-c", SCRIPT + ORDERS[order] + END, *arguments]
        running[golden] = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for golden, process in running.items():
        output, errors = process.communicate(timeout=120)
        assert process.returncode == 0, (golden, errors)
        assert output.rstrip().endswith("] 1"), f"{golden}: the results differ"
