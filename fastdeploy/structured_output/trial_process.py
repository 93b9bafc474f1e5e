# SPDX-License-Identifier: Apache-2.0
"""Tries forms in a child process with limits of time and memory, before the engine compiles them.

The library that compiles grammars has limits of its own, but some short forms take it minutes or all memory. The
process (`main`) reads the vocabulary once, then forks for each form: the fork starts with the vocabulary in its memory,
and its end, whatever its cause, costs nothing but itself. A limit that ends it is a verdict on the form; a kill from
outside is none, and the form is tried once more. Requests and answers are lines of JSON.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import llguidance

from fastdeploy.core.child_command import child_command, child_environment
from fastdeploy.core.errors import InvalidRequestError
from fastdeploy.core.guided_decoding import StructuredOutputsParams
from fastdeploy.core.panics import RustPanicError, convert_panics
from fastdeploy.core.process import die_with_parent, memory_bytes
from fastdeploy.structured_output.schema_errors import FormSchemas
from fastdeploy.structured_output.source import LIMITS, make_source, one_line, refusal
from fastdeploy.structured_output.vocabulary import Vocabulary

MAX_CPU_S = 2.0
MAX_MEMORY_BYTES = 512 * 2**20
MAX_WAIT_S = 30.0  # for one form: much more than MAX_CPU_S, because the process has a low priority
MAX_START_S = 300.0  # until the vocabulary is read
NICE = 19
STACK_BYTES = 256 << 20  # a chain of references needs 3 kB per link, and the longest has about 10,000 links
KILLS_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # which no limit of a trial sends
NUM_TRIES = 2  # of a form whose process was killed
_TOO_LARGE = f"takes more than {MAX_CPU_S:g} s of processor time or {MAX_MEMORY_BYTES >> 20} MiB to compile"


class TrialError(Exception):
    """The process could not try a form; this says nothing about the form."""


class TrialEndedError(TrialError):
    """The process, or its fork for the form, was killed, but not by the limits of a trial."""


class TrialTimeoutError(TrialError):
    """A trial has taken MAX_WAIT_S, because the machine is busy."""


@dataclass(frozen=True)
class Verdict:
    """What a trial has found.

    Attributes:
        source: the grammar in llguidance's notation; "" if the form was refused.
        num_bytes: memory that the compiled grammar holds, about.
        field: the field that `message` speaks of; "" for the field of the form.
        path: the part of the form that `message` speaks of, to be appended to the field's name.
        message: why the form was refused.
        unknown_formats: the formats of JSON schemas in the form that are not followed.
    """

    source: str = ""
    num_bytes: int = 0
    field: str = ""
    path: str = ""
    message: str = ""
    unknown_formats: Sequence[str] = ()


class TrialProcess:
    """The child process. It starts with the first form, and again if it has died. One thread at a time may use it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._output = b""  # what has been read after the last complete line
        self._lock = threading.Lock()
        self._is_closed = False

    def run(self, vocabulary: Vocabulary, spec: StructuredOutputsParams) -> Verdict:
        """Try a form, once more if the process is killed meanwhile: by the administrator, or for lack of memory.

        Raises:
            TrialTimeoutError: the trial has taken MAX_WAIT_S seconds.
            TrialEndedError: the process was killed each time.
            TrialError: the process has failed.
        """
        for _ in range(NUM_TRIES - 1):
            with suppress(TrialEndedError):
                return self._try(vocabulary, spec)
        return self._try(vocabulary, spec)

    def _try(self, vocabulary: Vocabulary, spec: StructuredOutputsParams) -> Verdict:
        try:
            if self._process is None:
                self._start(vocabulary)
            answer = self._exchange(_line(spec.arguments), MAX_WAIT_S)
            verdict = None if "killed_by" in answer else Verdict(**answer)
        except BrokenPipeError as error:
            self._kill()
            raise TrialEndedError("the process has ended") from error
        except (OSError, ValueError, TypeError, TrialError) as error:
            self._kill()
            raise error if isinstance(error, TrialError) else TrialError(str(error)) from error
        if verdict is None:
            raise TrialEndedError(f"signal {answer['killed_by']} has ended the trial")
        return verdict

    def close(self) -> None:
        """Kill the process for good."""
        with self._lock:
            self._is_closed = True
        self._kill()

    def _start(self, vocabulary: Vocabulary) -> None:
        with self._lock:
            if self._is_closed:
                raise TrialError("closed")
            self._output = b""
            self._process = subprocess.Popen(
                child_command("fastdeploy.structured_output.trial_process", str(os.getpid())),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=child_environment(),
                start_new_session=True,  # so that Ctrl-C interrupts the server only
            )
        tokens = [token.decode("latin-1") for token in vocabulary.tokens[:-1]]
        self._exchange(_line([tokens, vocabulary.special_token_ids[:-1]]), MAX_START_S)

    def _exchange(self, line: bytes, timeout_s: float) -> dict[str, Any]:
        """Write a line; return the answer."""
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        process.stdin.write(line)
        process.stdin.flush()
        deadline_s = time.monotonic() + timeout_s
        poll = select.poll()
        poll.register(process.stdout, select.POLLIN)
        while b"\n" not in self._output:
            if not poll.poll(max(0.0, deadline_s - time.monotonic()) * 1000):
                raise TrialTimeoutError(f"the trial of the form has taken more than {timeout_s:g} s")
            data = os.read(process.stdout.fileno(), 1 << 20)
            if not data:
                raise TrialEndedError("the process has ended")
            self._output += data
        answer, _, self._output = self._output.partition(b"\n")
        return dict(json.loads(answer))

    def _kill(self) -> None:
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


def _line(value: Any) -> bytes:
    return json.dumps(value).encode() + b"\n"


def main(arguments: Sequence[str]) -> None:
    """Read the vocabulary, answer, then answer the forms of standard input until it is closed."""
    die_with_parent(int(arguments[0]))
    tokens, special_ids = json.loads(sys.stdin.buffer.readline())
    vocabulary = Vocabulary([token.encode("latin-1") for token in tokens], special_ids)
    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(vocabulary))
    _write({})
    os.nice(NICE)
    while line := sys.stdin.buffer.readline():
        answer, status = _fork(tokenizer, vocabulary, line)
        if answer.endswith(b"\n"):  # whatever has ended the fork afterwards
            sys.stdout.buffer.write(answer)
            sys.stdout.buffer.flush()
        elif os.WIFSIGNALED(status) and os.WTERMSIG(status) in KILLS_FROM_OUTSIDE:
            _write({"killed_by": os.WTERMSIG(status)})
        else:
            _write({"message": _TOO_LARGE})


def _fork(tokenizer: llguidance.LLTokenizer, vocabulary: Vocabulary, line: bytes) -> tuple[bytes, int]:
    """Answer one form in a fork, whose standard output is a pipe; return what it has written, and its wait status."""
    process_id = os.getpid()
    reading, writing = os.pipe()
    child_id = os.fork()
    if child_id == 0:
        die_with_parent(process_id)
        os.dup2(writing, sys.stdout.fileno())
        _run_with_limits(tokenizer, vocabulary, line)
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        answer = pipe.read()
    _, status = os.waitpid(child_id, 0)
    return answer, status


def _run_with_limits(tokenizer: llguidance.LLTokenizer, vocabulary: Vocabulary, line: bytes) -> None:
    """Answer one form in a thread whose stack is large enough for the deepest grammar."""
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=_limit_and_answer, args=(tokenizer, vocabulary, line))
    thread.start()
    thread.join()


def _limit_and_answer(tokenizer: llguidance.LLTokenizer, vocabulary: Vocabulary, line: bytes) -> None:
    """Answer one form. The timer kills the process even within a C function, and so does a failed allocation."""
    limit = memory_bytes()[0] + MAX_MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)
    try:
        answer = _answer(tokenizer, vocabulary, line)
    except MemoryError:
        os._exit(1)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    signal.setitimer(signal.ITIMER_PROF, 0)
    _write(answer)


def _answer(tokenizer: llguidance.LLTokenizer, vocabulary: Vocabulary, line: bytes) -> dict[str, Any]:
    spec, schemas = StructuredOutputsParams(**json.loads(line)), FormSchemas()
    try:
        source = make_source(spec, vocabulary.special_ids, schemas)
        num_bytes = _compile(tokenizer, source)
    except InvalidRequestError as error:
        return _refusal(spec, error)
    except (ValueError, RustPanicError) as error:
        return _refusal(spec, refusal(spec, schemas, str(error)))
    return {"source": source, "num_bytes": num_bytes, "unknown_formats": sorted(schemas.unknown_formats)}


def _refusal(spec: StructuredOutputsParams, error: InvalidRequestError) -> dict[str, Any]:
    """Return the answer to a form that was refused."""
    message = one_line(error.message)
    if error.field in (spec.schemas or {}):
        return {"field": error.field, "message": message}
    path = error.field.removeprefix(spec.field)
    return {"path": path, "message": message} if path else {"message": message}


@convert_panics
def _compile(tokenizer: llguidance.LLTokenizer, source: str) -> int:
    """Compile a grammar and compute a bitmask, because the lexer works there; return the memory that it holds."""
    before = memory_bytes()[1]
    matcher = llguidance.LLMatcher(tokenizer, source, log_level=0, limits=LIMITS)
    if matcher.is_error():
        raise ValueError(matcher.get_error())
    matcher.compute_bitmask()
    return max(memory_bytes()[1] - before, 0)


def _write(answer: dict[str, Any]) -> None:
    sys.stdout.buffer.write(_line(answer))
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
