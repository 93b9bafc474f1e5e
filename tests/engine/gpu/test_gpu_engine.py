# SPDX-License-Identifier: Apache-2.0
"""Speculation is invisible on a GPU too, and a runner that forgets to exchange memory is found out.

Engines run in a process of their own, because Paddle has to know the device when it is imported. The GPU is emulated;
on a machine with a card and its library, `FD_GPU_EMULATED=0 python -m pytest tests/engine/gpu` runs these tests there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from threading import Timer

import pytest

from tests.drafting_models import HEADS
from tests.engine.gpu.cells import Answer, Cell
from tests.engine.gpu.small_model import NUM_LAYERS, write_heads, write_model
from tests.pairwise import pairwise

METHODS = ("ngram", "suffix", "mtp", "with_ngram", "draft_model")
CELLS = [
    Cell(*values)
    for values in pairwise(METHODS, (1, 8), (0.0, 0.3), (64, 5), (True, False), (True, False), ("auto", "int8"))
]
IS_EMULATED = os.environ.get("FD_GPU_EMULATED") != "0"
Ask = Callable[..., Answer]
emulated_only = pytest.mark.skipif(not IS_EMULATED, reason="only the emulator counts launches and delays copies")


class Worker:
    """The process; `ask` starts it again if a cell has ended it, or has not answered in time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[str] | None = None

    def ask(self, cell: Cell, timeout_s: float = 300.0) -> Answer:
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.engine.gpu.cells", str(self._folder)],
                env={**os.environ, "FD_GPU_EMULATED": "1" if IS_EMULATED else "0"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(asdict(cell)) + "\n")
        self._process.stdin.flush()
        timer = Timer(timeout_s, self._process.kill)
        timer.start()
        try:
            for line in self._process.stdout:
                if line.startswith("ANSWER "):
                    return Answer(**json.loads(line.removeprefix("ANSWER ")))
        finally:
            timer.cancel()
        return Answer([], error=f"the process ended with status {self._process.wait()}")

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small_model")
    write_model(folder / "target")
    write_model(folder / "draft_model", seed=1, has_mtp_layer=False)
    write_heads(folder)
    return folder


@pytest.fixture(scope="module")
def ask(folder: Path) -> Iterator[Ask]:
    worker = Worker(folder)
    yield worker.ask
    worker.close()


@pytest.fixture(scope="module")
def plain_answer(ask: Ask) -> Callable[[float, str], Answer]:
    """Plain decoding, one request at a time, at a temperature and with a cache."""

    @cache
    def answer(temperature: float, kv_cache_dtype: str) -> Answer:
        found = ask(Cell(batch=1, temperature=temperature, kv_cache_dtype=kv_cache_dtype))
        assert found.error == ""
        assert found.is_exact, "an operator runs its reference"
        return found

    return answer


@pytest.fixture(scope="module")
def plain(plain_answer: Callable[[float, str], Answer]) -> Callable[[Cell], list[list[int]]]:
    """The texts of plain decoding that a cell must have."""
    return lambda cell: plain_answer(cell.temperature, cell.kv_cache_dtype).texts


def test_there_are_at_most_16_cells() -> None:
    assert len(CELLS) <= 16


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: "-".join(map(str, asdict(cell).values())).rstrip("-"))
def test_speculation_changes_no_text_on_a_gpu(cell: Cell, ask: Ask, plain: Callable[[Cell], list[list[int]]]) -> None:
    answer = ask(cell)
    assert answer.error == ""
    assert answer.texts == plain(cell)
    assert answer.num_draft_tokens > answer.num_accepted_tokens > 0
    assert (answer.num_replays > 0) == cell.graphs
    assert (answer.num_prefix_hits > 0) == cell.prefix_caching
    assert not cell.graphs or answer.num_paddle_calls == 0, "Paddle does nothing between a step's launch and its wait"


@pytest.mark.parametrize("temperature", [0.0, 0.3])
@pytest.mark.parametrize("method", HEADS)
def test_trained_heads_change_no_text_on_a_gpu(
    method: str, temperature: float, ask: Ask, plain: Callable[[Cell], list[list[int]]]
) -> None:
    cell = Cell(method, temperature=temperature)
    answer = ask(cell)
    assert (answer.error, answer.is_exact) == ("", True)
    assert answer.texts == plain(cell)
    assert answer.num_draft_tokens > 0 and answer.num_replays > 0
    assert answer.num_paddle_calls == 0


def test_the_temperature_and_the_cache_change_the_texts(plain: Callable[[Cell], list[list[int]]]) -> None:
    texts = [plain(Cell(temperature=t, kv_cache_dtype=dtype)) for t, dtype in ((0.0, "auto"), (0.3, "auto"))]
    assert texts[0] != texts[1]


@pytest.mark.parametrize(
    "cell", [Cell("mtp", temperature=0.3), Cell("ngram", kv_cache_dtype="int8")], ids=["mtp", "int8"]
)
def test_two_nodes_with_a_gpu_give_the_texts_of_one(
    cell: Cell, ask: Ask, plain: Callable[[Cell], list[list[int]]]
) -> None:
    answer = ask(replace(cell, is_split=True))
    assert answer.error == ""
    assert answer.texts == plain(cell)


@emulated_only
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_a_decode_step_on_a_gpu_has_at_most_six_launches_per_layer_and_twelve_more(
    kv_cache_dtype: str, plain_answer: Callable[[float, str], Answer]
) -> None:
    assert 0 < plain_answer(0.0, kv_cache_dtype).num_launches <= 6 * NUM_LAYERS + 12


def test_an_operator_that_failed_the_check_of_a_gpu_runs_its_reference_and_the_model_answers(ask: Ask) -> None:
    answer = ask(Cell("ngram", failing="rms_norm"))
    assert answer.error == ""
    assert [len(text) for text in answer.texts] == [24] * 8
    assert not answer.is_exact
    assert answer.num_replays == 0, "a reference runs on the host, so nothing is captured"


@emulated_only
@pytest.mark.parametrize("omitted", ["upload", "wait", "download"])
def test_a_runner_that_forgets_to_exchange_memory_is_found_out(
    omitted: str, ask: Ask, plain: Callable[[Cell], list[list[int]]]
) -> None:
    expected = plain(Cell())  # before, because what is omitted may leave the process unusable
    answer = ask(Cell(batch=1, omits=omitted), timeout_s=15.0)
    assert answer.error or answer.texts != expected
