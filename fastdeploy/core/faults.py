# SPDX-License-Identifier: Apache-2.0
"""Named fault points: places in the handling of requests at which tests inject a fault.

`FD_FAULT=commit:raise` with `FD_DEBUG=1` arms the point `commit`: the first request that reaches it gets an exception
that no code expects. `FD_FAULT=commit:raise@r7` waits for a request whose id ends with `r7`, and several faults
are separated by commas. Every process arms its faults once, when it starts, and each of them fires once.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from fastdeploy.core.errors import ConfigError, did_you_mean

VARIABLE = "FD_FAULT"
POINTS = {
    "parse": "API process: the body has been parsed, before its fields are checked",
    "tokenise": "API process and `LLM`: before the prompt is encoded",
    "build": "API process and `LLM`: before the request for the engine is made",
    "detokenise": "API process: before new tokens become text",
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


ACTIONS: dict[str, Callable[[Fault], None]] = {"raise": _raise}


@dataclass
class Fault:
    """What happens at a fault point, once.

    Attributes:
        point, action: keys of POINTS and ACTIONS.
        request_id: end of the id of the request that it is for; "" takes the first request that reaches the point.
        num_skipped: how often such a request passes the point before.
    """

    point: str
    action: str = "raise"
    request_id: str = ""
    num_skipped: int = 0
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
    point, _, rest = text.partition(":")
    action, _, request_id = rest.partition("@")
    if point not in POINTS or action not in ACTIONS:
        hint = did_you_mean(point, POINTS) if point not in POINTS else ""
        raise ConfigError(
            VARIABLE,
            f"expected point:action or point:action@request-id, got {text!r}{hint}; points: {', '.join(POINTS)}; "
            f"actions: {', '.join(ACTIONS)}",
        )
    return Fault(point, action, request_id)
