# SPDX-License-Identifier: Apache-2.0
"""Compiles the forms of requests beside the steps of the engine."""

from __future__ import annotations

import json
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from weakref import WeakSet

from fastdeploy.core.errors import InvalidRequestError, QueueFullError
from fastdeploy.core.faults import fault_point
from fastdeploy.core.request import GenerationRequest
from fastdeploy.core.schema_dialect import note_unknown_formats
from fastdeploy.structured_output.form_queue import Form, FormQueue
from fastdeploy.structured_output.grammar import GrammarCompiler, GrammarMemory, GrammarState
from fastdeploy.structured_output.trial_process import STACK_BYTES, TrialProcess, TrialTimeoutError, Verdict

MAX_CACHED_FORMS = 64
NUM_THREADS = 2  # each with a process for its trials
MAX_HELD_BYTES = 1 << 30  # of the grammars of one client
MAX_CLOSE_S = 5.0  # for a compilation that has passed its trial


class FormCompiler:
    """Threads that try each new form in a child process, then compile it; the latest results are cached.

    A thread takes the next form, tries it and compiles it before it takes another. The first thread starts at once and
    reads the vocabulary, which can take seconds, while the weights are loaded. The processes start with the first form
    and not before, since each holds the vocabulary once more, and most servers never get one.
    """

    def __init__(self, make_compiler: Callable[[], GrammarCompiler]) -> None:
        """Start the first thread, which calls `make_compiler`."""
        self._compiler: Future[GrammarCompiler] = Future()
        self._changed = threading.Condition()  # its lock guards all that follows, and all forms
        self._queue = FormQueue()
        self._forms: OrderedDict[str, Form] = OrderedDict()
        self._memories: WeakSet[GrammarMemory] = WeakSet()  # of the grammars in the cache and of requests
        self._num_idle = 0
        self._is_closed = False
        self._threads: list[threading.Thread] = []
        self._trials = [TrialProcess() for _ in range(NUM_THREADS)]
        self._start_thread(lambda: self._run(self._trials[0], make_compiler))

    def submit(self, request: GenerationRequest) -> tuple[Form, Future[None]]:
        """Return the form of a request that has one, and a future that is done when the form is.

        When no future of a form is left, it is not compiled. It is in the cache at least as long as there is one. An
        exception that says nothing about the form is not kept longer.

        Raises:
            QueueFullError: too many forms of the client are waiting.
        """
        spec = request.params.form
        assert spec is not None
        key = json.dumps(spec.arguments)
        with self._changed:
            form = self._forms.get(key)
            if form is None or (isinstance(form.result, Exception) and not form.is_wanted):
                form = Form(request.request_id, request.client_id, spec)
            waiter = form.wait()
            if not form.is_started:
                self._queue.push(request.client_id, form, request.client_weight)
                self._wake_thread()
            self._forms[key] = form
            self._forms.move_to_end(key)
            self._evict()
        return form, waiter

    def close(self) -> None:
        """End the processes and the threads."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for trial in self._trials:
            trial.close()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(MAX_CLOSE_S)

    def _wake_thread(self) -> None:
        if self._num_idle < len(self._queue) and len(self._threads) < NUM_THREADS:
            trial = self._trials[len(self._threads)]
            self._start_thread(lambda: self._serve(trial))
        self._changed.notify()

    def _start_thread(self, target: Callable[[], None]) -> None:
        """Start a thread with a large stack, of which only the used part costs memory."""
        before = threading.stack_size(STACK_BYTES)
        try:
            thread = threading.Thread(target=target, name="grammar", daemon=True)
            thread.start()
        finally:
            threading.stack_size(before)
        self._threads.append(thread)

    def _run(self, trial: TrialProcess, make_compiler: Callable[[], GrammarCompiler]) -> None:
        try:
            self._compiler.set_result(make_compiler())
        except Exception as error:
            self._compiler.set_exception(error)
        self._serve(trial)

    def _serve(self, trial: TrialProcess) -> None:
        while (form := self._next_form()) is not None:
            try:
                result: GrammarState | Verdict | Exception = self._compile(form, trial)
            except Exception as error:  # of any kind: the requests that wait for the form get it
                result = error
            with self._changed:
                form.finish(result)
            del form, result  # an idle thread keeps no form

    def _next_form(self) -> Form | None:
        """Wait for a form; return None if the compiler is closed."""
        with self._changed:
            while not self._is_closed:
                if (form := self._queue.pop()) is not None:
                    return form
                self._num_idle += 1
                self._changed.wait()
                self._num_idle -= 1
        return None

    def _compile(self, form: Form, trial: TrialProcess) -> GrammarState | Verdict:
        fault_point("compile", form.request_id)
        compiler = self._compiler.result()
        try:
            verdict = trial.run(compiler.vocabulary, form.spec)
        except TrialTimeoutError as error:
            raise QueueFullError(str(error)) from None
        if verdict.message:
            return verdict
        note_unknown_formats(verdict.unknown_formats)
        memory = self._reserve(GrammarMemory(form.client_id, verdict.num_bytes))
        try:
            return compiler.compile_source("", verdict.source, memory)
        except InvalidRequestError as error:
            return Verdict(message=error.message)

    def _reserve(self, memory: GrammarMemory) -> GrammarMemory:
        """Make room for a grammar among those of its client; raise QueueFullError if its requests hold too much."""
        with self._changed:
            while self._held_bytes(memory.client_id) + memory.num_bytes > MAX_HELD_BYTES:
                keys = [key for key, form in self._forms.items() if form.client_id == memory.client_id]
                key = next((key for key in keys if not self._forms[key].is_wanted), None)
                if key is None:
                    raise QueueFullError(f"the grammars of this client's requests hold {MAX_HELD_BYTES >> 20} MiB")
                del self._forms[key]
            self._memories.add(memory)
        return memory

    def _held_bytes(self, client_id: str) -> int:
        return sum(memory.num_bytes for memory in self._memories if memory.client_id == client_id)

    def _evict(self) -> None:
        """Remove the form that was not used for longest, of the client with most forms, unless anybody waits for it."""
        while len(self._forms) > MAX_CACHED_FORMS:
            unwanted = {key: form.client_id for key, form in self._forms.items() if not form.is_wanted}
            if not unwanted:
                return
            client_id = Counter(unwanted.values()).most_common(1)[0][0]
            del self._forms[next(key for key, owner in unwanted.items() if owner == client_id)]
