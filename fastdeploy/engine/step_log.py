# SPDX-License-Identifier: Apache-2.0
"""Lines of FD_LOG_LEVEL=DEBUG: what each step computed and in what time, and when requests are scheduled."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from fastdeploy.core.generation_request import without_marks
from fastdeploy.core.step import RequestResult, ScheduledRequest, StepPlan

if TYPE_CHECKING:
    from fastdeploy.engine.engine import Engine, Runner


class LoggedRunner:
    """Logs the steps of a runner, without any text, token or key. An engine has it only if the level is DEBUG."""

    def __init__(self, runner: Runner, logger: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self.runner = runner
        self._logger = logger
        self._clock = clock
        self._num_steps = 0
        self._last_end_s: float | None = None

    def run(self, plan: StepPlan) -> Sequence[RequestResult]:
        """Run a step; log its prompts before it and what it computed after it."""
        self._num_steps += 1
        first_admitted = len(plan.requests) - plan.num_admitted
        for index, scheduled in enumerate(plan.requests):
            if index >= first_admitted or scheduled.request.num_pending > 1:
                self._log_prompt(scheduled, is_admitted=index >= first_admitted)
        start_s = self._clock()
        results = self.runner.run(plan)
        self._log_step(plan, results, start_s, self._clock())
        return results

    def _log_prompt(self, scheduled: ScheduledRequest, is_admitted: bool) -> None:
        """Log which rows of a prompt, or of a text that is computed again, a step has."""
        request = scheduled.request
        start, end = scheduled.num_computed_tokens, scheduled.num_computed_tokens + scheduled.num_scheduled_tokens
        shown = without_marks(request.request_id)
        line = f"{shown}[{request.index}]: tokens {start} to {end} of {request.num_tokens}"
        if is_admitted:
            waited_s, num_preemptions = request.metrics.queue_s or 0.0, request.metrics.num_preemptions
            again = f"again after {num_preemptions} preemptions" if num_preemptions else ""
            line += f", admitted {again or f'{waited_s:.4f} s after its arrival'}"
        self._logger.debug("step %d: %s", self._num_steps, line)

    def _log_step(self, plan: StepPlan, results: Sequence[RequestResult], start_s: float, end_s: float) -> None:
        num_drafts = sum(len(scheduled.draft) for scheduled in plan.requests)
        num_accepted = sum(result.num_accepted for result in results)
        between = (
            "" if self._last_end_s is None else f", {1e3 * (start_s - self._last_end_s):.2f} ms after the step before"
        )
        self._last_end_s = end_s
        self._logger.debug(
            "step %d: %d rows of %d requests (%d admitted), %d drafts (%d accepted), %d tokens, %.2f ms%s",
            self._num_steps,
            plan.num_scheduled_tokens,
            len(plan.requests),
            plan.num_admitted,
            num_drafts,
            num_accepted,
            sum(len(result.token_ids) for result in results),
            1e3 * (end_s - start_s),
            between,
        )


def log_steps(engine: Engine, logger: logging.Logger) -> Engine:
    """Let an engine log its steps if the level is DEBUG; return it."""
    if logger.isEnabledFor(logging.DEBUG):
        engine.runner = LoggedRunner(engine.runner, logger)
    return engine
