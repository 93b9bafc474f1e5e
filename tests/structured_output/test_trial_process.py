# SPDX-License-Identifier: Apache-2.0
"""The process that tries forms: its limits, its answers, and its end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from fastdeploy.core.guided_decoding import GuidedDecodingParams
from fastdeploy.structured_output import trial_process
from fastdeploy.structured_output.trial_process import TrialEndedError, TrialError, TrialProcess, Verdict
from fastdeploy.structured_output.vocabulary import TokenizerAdapter, Vocabulary
from tests.detokenize.tokenizers_for_tests import make_tokenizer

ENDLESS = {"grammar": 'start: %json {"type": "number", "multipleOf": 2147483648}'}
TOO_LARGE = "takes more than 2 s of processor time or 512 MiB to compile"
OFFLINE = """
from fastdeploy import LLM, GuidedDecodingParams, SamplingParams

llm = LLM("demo", max_model_len=64)
params = SamplingParams(max_tokens=3, guided_decoding=GuidedDecodingParams(choice=["yes", "no"]))
print(llm.generate("x", params, use_tqdm=False)[0].outputs[0].text)
compiler = llm.engine.admission._structured_output._compiler
pids = [trial._process.pid for trial in compiler._trials if trial._process is not None]
print(*pids, flush=True)
"""
KILLED = """
import os, signal

os.kill(pids[0], signal.SIGSTOP)  # so that it notices nothing itself
os.kill(os.getpid(), signal.SIGKILL)
"""


@cache
def vocabulary() -> TokenizerAdapter:
    tokenizer = make_tokenizer("byte_level")
    return TokenizerAdapter(tokenizer, tokenizer.vocab_size)


@pytest.fixture
def trial() -> Iterator[TrialProcess]:
    process = TrialProcess()
    yield process
    process.close()


def try_form(trial: TrialProcess, **form: Any) -> Verdict:
    return trial.run(vocabulary(), GuidedDecodingParams(**form))


def test_a_form_that_never_compiles_is_refused_and_the_next_one_is_tried(trial: TrialProcess) -> None:
    assert try_form(trial, **ENDLESS) == Verdict(message=TOO_LARGE)
    assert trial._process is not None
    pid = trial._process.pid
    assert "start: /a|b/" in try_form(trial, choice=["a", "b"]).source
    assert trial._process.pid == pid  # the vocabulary was not read again


def test_a_form_that_takes_too_much_memory_ends_its_process_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def exit_status(num_bytes: int) -> int:
        monkeypatch.setattr(trial_process, "_answer", lambda *args: {"message": str(len(bytearray(num_bytes)))})
        monkeypatch.setattr(trial_process, "_write", lambda answer: None)
        if (pid := os.fork()) == 0:
            trial_process._run_with_limits(None, None, b"")  # type: ignore[arg-type]
            os._exit(0)
        return os.waitpid(pid, 0)[1]

    assert exit_status(400 << 20) == 0
    assert exit_status(600 << 20) != 0


def test_a_refusal_says_which_part_of_the_form_is_wrong(trial: TrialProcess) -> None:
    verdict = try_form(trial, structural_tag={"format": {"type": "tag", "begin": None}})
    assert verdict == Verdict(path=".format.begin", message="expected a string, got null")


def test_a_panic_of_the_library_refuses_the_form(monkeypatch: pytest.MonkeyPatch) -> None:
    class PanicException(BaseException):
        """Stands for the class of PyO3."""

    def panic(*args: Any, **kwargs: Any) -> None:
        raise PanicException("index out of bounds")

    monkeypatch.setattr(trial_process.llguidance, "LLMatcher", panic)
    monkeypatch.setattr(trial_process, "make_source", lambda *args: "start: /a/")
    assert trial_process._answer(None, vocabulary(), b'{"regex": "a"}') == {  # type: ignore[arg-type]
        "message": "_compile: index out of bounds"
    }


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_form_whose_process_was_killed_is_tried_once_more(trial: TrialProcess, number: signal.Signals) -> None:
    assert try_form(trial, regex="a").source
    assert trial._process is not None
    os.kill(trial._process.pid, number)
    assert try_form(trial, regex="b").source


def test_a_process_that_is_killed_each_time_says_nothing_about_the_form(
    trial: TrialProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, num_starts = trial._start, 0

    def start_and_kill(vocabulary: Vocabulary) -> None:
        nonlocal num_starts
        num_starts += 1
        start(vocabulary)
        assert trial._process is not None
        trial._process.kill()

    monkeypatch.setattr(trial, "_start", start_and_kill)
    with pytest.raises(TrialEndedError):
        try_form(trial, regex="b")
    assert num_starts == 2
    monkeypatch.undo()
    assert try_form(trial, regex="b").source


@pytest.mark.parametrize("num_kills", [1, 2])
def test_a_trial_that_is_killed_is_tried_again_and_its_own_limit_is_a_verdict(
    trial: TrialProcess, num_kills: int
) -> None:
    assert try_form(trial, regex="a").source
    killed: set[int] = set()
    with ThreadPoolExecutor() as executor:
        process = trial._process
        trying = executor.submit(try_form, trial, **ENDLESS)
        while len(killed) < num_kills:
            for pid in forks_of(trial) - killed:
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
            time.sleep(0.01)
        if num_kills == 1:
            assert trying.result() == Verdict(message=TOO_LARGE)
        else:
            with pytest.raises(TrialEndedError, match="signal 9"):
                trying.result()
        assert trial._process is process, "the vocabulary is not read again"


def forks_of(trial: TrialProcess) -> set[int]:
    assert trial._process is not None
    pid = trial._process.pid
    return {int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}


def test_a_fork_that_is_killed_after_its_answer_gives_one_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer_and_die(*args: Any) -> None:
        os.write(sys.stdout.fileno(), b"{}\n")
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(trial_process, "_run_with_limits", answer_and_die)
    with open(os.devnull, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        answer, status = trial_process._fork(None, None, b"")  # type: ignore[arg-type]
    assert (answer, os.WTERMSIG(status)) == (b"{}\n", signal.SIGKILL)


def test_a_closed_process_does_not_start_again(trial: TrialProcess) -> None:
    trial.close()
    with pytest.raises(TrialError, match="closed"):
        try_form(trial, regex="a")


def test_environment_of_the_process_has_no_key_of_the_server(
    trial: TrialProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FD_API_KEY", "secret")
    assert try_form(trial, regex="a").source
    assert trial._process is not None
    assert b"secret" not in Path(f"/proc/{trial._process.pid}/environ").read_bytes()


def test_the_process_loads_neither_paddle_nor_numpy() -> None:
    """It would take seconds and memory."""
    script = (
        "import fastdeploy.structured_output.trial_process, sys; "
        "print(*sys.modules.keys() & {'paddle', 'numpy', 'fastdeploy.structured_output.grammar'})"
    )
    assert (
        subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=120).stdout
        == "\n"
    )


def is_alive(pid: int) -> bool:
    """Return whether a process runs; a process that has ended and waits for its parent does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for_end(pid: int) -> None:
    deadline_s = time.monotonic() + 60
    while is_alive(pid):
        assert time.monotonic() < deadline_s, "the process has not ended"
        time.sleep(0.02)


@pytest.mark.parametrize("end", ["", KILLED])
def test_the_process_ends_with_a_script_that_has_no_main_guard(tmp_path: Path, end: str) -> None:
    (tmp_path / "script.py").write_text(OFFLINE + end)
    result = subprocess.run(
        [sys.executable, tmp_path / "script.py"], capture_output=True, text=True, check=False, timeout=120
    )
    assert result.returncode == (-signal.SIGKILL if end else 0), result.stderr
    text, pid = result.stdout.splitlines()
    assert text in ("yes", "no")
    wait_for_end(int(pid))
