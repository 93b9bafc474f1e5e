# SPDX-License-Identifier: Apache-2.0
"""Named fault points: places in the handling of requests at which tests inject a fault.

`FD_FAULT=commit:raise` with `FD_DEBUG=1` arms the point `commit`: the first request that reaches it gets an exception
that no code expects. Other actions are `kill`, `stop` (the process stands still until it gets SIGCONT) and `delay=2`
(the thread sleeps for 2 seconds). `commit:raise@r7` waits for a request whose id ends with `r7`, and
`commit:raise+5@r7` lets it pass five times before. Several faults are separated by commas. A process arms its faults
once, when it starts, unless it replaces one that has ended; each of them fires once.
"""

from __future__ import annotations

import logging
import math
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from fastdeploy.core.errors import ConfigError, did_you_mean

VARIABLE = "FD_FAULT"
POINTS = {
    "parse": "API process: the body has been parsed, before its fields are checked",
    "tokenise": "API process and `LLM`: before the prompt is encoded",
    "build": "API process and `LLM`: before the request for the engine is made",
    "detokenise": "API process: before new tokens become text",
    "owner_enqueue": "API process: before a ticket is written to Redis",
    "owner_enqueued": "API process: after a ticket was written to Redis",
    "owner_receive": "API process: messages were read from Redis, before they are handled",
    "owner_audit": "API process: before it lists its tickets in Redis",
    "owner_beat": "API process: before a heartbeat",
    "agent_claim": "agent: before the claim of a ticket is written",
    "agent_claimed": "agent: after the claim of a ticket was written",
    "agent_fetch": "agent: the engine was asked to import an image",
    "agent_start": "agent: before a leg is given to the engine",
    "agent_send": "agent: before tokens are written to their owner",
    "agent_drain": "agent: before the engine is asked to give up a request",
    "agent_handed": "agent: the engine has given up a request, before its owner is told",
    "agent_beat": "agent: before a heartbeat",
    "prepare": "engine: before the request's grammar is looked up or submitted",
    "admit": "engine: before the request is checked",
    "compile": "engine: in the thread that compiles the request's grammar",
    "output_start": "engine: a choice is added, before its stops are stored",
    "proposer_start": "engine: a choice is added, before the proposer gets it",
    "sampling_metadata": "engine: before the sampling parameters of a request's rows are written",
    "constraint_mask": "engine: before the masks of a request's rows are filled",
    "logprobs": "engine: before log-probabilities of a request's rows are read",
    "stop_scan": "engine: before the tokens of a step are searched for a stop",
    "constraint_advance": "engine: before a constraint advances by an emitted token",
    "commit": "engine: the tokens of a step are appended, before they count as computed",
    "delta": "engine: before the delta of a step is completed",
    "constraint_draft": "engine: before a draft is checked against a constraint",
    "finish": "engine: after each component that has removed an ended choice",
    "propose": "engine: before the proposer drafts for a batch",
    "observe": "engine: before the drafting model is told of a step",
    "run": "engine: before the rows of a step are computed",
}
"""Where each point is. The last three are calls for a whole batch."""

logger = logging.getLogger("fastdeploy.faults")


class InjectedFault(Exception):
    """Raised at a fault point. No code but a test may expect it."""


def _raise(fault: Fault) -> None:
    raise InjectedFault(f"{VARIABLE}: {fault.point}")


def _send_signal(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


ACTIONS: dict[str, Callable[[Fault], None]] = {
    "raise": _raise,
    "kill": lambda fault: _send_signal(signal.SIGKILL),
    "stop": lambda fault: _send_signal(signal.SIGSTOP),
    "delay": lambda fault: time.sleep(fault.delay_s),
}
MAX_DELAY_S = 600.0
_SYNTAX = re.compile(r"(\w+):(\w+)(?:=([0-9.]+))?(?:\+([0-9]{1,9}))?(?:@(.*))?")


@dataclass
class Fault:
    """What happens at a fault point, once.

    Attributes:
        point, action: keys of POINTS and ACTIONS.
        request_id: end of the id of the request that it is for; "" takes the first request that reaches the point.
        num_skipped: how often such a request passes the point before.
        delay_s: seconds to sleep, for the action `delay`.
    """

    point: str
    action: str = "raise"
    request_id: str = ""
    num_skipped: int = 0
    delay_s: float = 0.0
    has_fired: bool = False


_armed: tuple[Fault, ...] = ()
_lock = threading.Lock()


def parse_faults(text: str) -> tuple[Fault, ...]:
    """Read the value of FD_FAULT; "" holds no faults.

    Raises:
        ConfigError: a point or an action is unknown; the message names the known ones.
    """
    return tuple(_parse_fault(part) for part in text.split(",") if part)


def arm(faults: Iterable[Fault]) -> None:
    """Arm these faults in this process, and disarm all others."""
    global _armed
    _armed = tuple(faults)
    for fault in _armed:
        logger.warning("fault point %s is armed: %s for %s", fault.point, fault.action, fault.request_id or "the first")


def fault_point(point: str, request_id: str = "") -> None:
    """Mark a fault point; `request_id` is "" where a call is for a whole batch or where no request has an id yet."""
    if _armed:
        _reach(point, request_id)


def _reach(point: str, request_id: str) -> None:
    with _lock:
        fault = next(
            (f for f in _armed if f.point == point and not f.has_fired and request_id.endswith(f.request_id)), None
        )
        if fault is None:
            return
        fault.num_skipped -= 1
        if fault.num_skipped >= 0:
            return
        fault.has_fired = True
    ACTIONS[fault.action](fault)


def _parse_fault(text: str) -> Fault:
    found = _SYNTAX.fullmatch(text)
    point, action, seconds, num_skipped, request_id = found.groups(default="") if found else ("",) * 5
    delay_s = _parse_delay(seconds) if action == "delay" else 0.0
    has_delay = bool(seconds) == (action == "delay")
    if point not in POINTS or action not in ACTIONS or not has_delay or math.isnan(delay_s):
        named = text.partition(":")[0]
        hint = did_you_mean(named, POINTS) if named not in POINTS else ""
        raise ConfigError(
            VARIABLE,
            f"expected point:action, point:action+passes or point:action@request-id, got {text!r}{hint}; "
            f"points: {', '.join(POINTS)}; actions: raise, kill, stop, delay=SECONDS (at most {MAX_DELAY_S:g})",
        )
    return Fault(point, action, request_id, int(num_skipped or 0), delay_s)


def _parse_delay(text: str) -> float:
    """Return the seconds of `delay=text`; not a number if they cannot be used."""
    try:
        seconds = float(text)
    except ValueError:
        return math.nan
    return seconds if 0 <= seconds <= MAX_DELAY_S else math.nan
