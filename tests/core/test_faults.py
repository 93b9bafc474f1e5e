# SPDX-License-Identifier: Apache-2.0
"""A fault point does nothing unless it is armed, and then raises once, for the request that it is armed for."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import fastdeploy
from fastdeploy.config.env import read_env
from fastdeploy.core import faults
from fastdeploy.core.errors import ConfigError
from fastdeploy.core.faults import POINTS, Fault, InjectedFault, fault_point, parse_faults
from tests.fault_points import armed


def reached(point: str, request_ids: list[str]) -> list[str]:
    """Pass a point for each request in turn; return those for which it raised."""
    found = []
    for request_id in request_ids:
        try:
            fault_point(point, request_id)
        except InjectedFault as fault:
            assert str(fault) == f"FD_FAULT: {point}"
            found.append(request_id)
    return found


def test_a_point_that_is_not_armed_does_nothing() -> None:
    assert reached("commit", ["a", "b"]) == []
    with armed("admit"):
        assert reached("commit", ["a", "b"]) == []


def test_a_fault_is_raised_once_for_the_first_request() -> None:
    with armed("commit") as fault:
        assert reached("commit", ["a", "b", "a"]) == ["a"]
        assert fault.has_fired
    assert reached("commit", ["a"]) == []


def test_a_fault_waits_for_the_request_whose_id_ends_with_its_own() -> None:
    with armed("commit", "r1"):
        assert reached("commit", ["", "r12", "cmpl-r1", "r1"]) == ["cmpl-r1"]


def test_a_fault_lets_its_request_pass_as_often_as_it_says() -> None:
    with armed("commit", "a", num_skipped=2):
        assert reached("commit", ["a", "b", "a", "b"]) == []
        assert reached("commit", ["b", "a", "a"]) == ["a"]


def test_the_value_of_the_variable_holds_several_faults() -> None:
    assert parse_faults("") == ()
    assert parse_faults("commit:raise,admit:raise@r7") == (Fault("commit", "raise"), Fault("admit", "raise", "r7"))


def test_a_fault_has_passes_seconds_and_a_request() -> None:
    assert parse_faults("run:kill+30,admit:stop@a+1,commit:delay=0.5+2@r7") == (
        Fault("run", "kill", num_skipped=30),
        Fault("admit", "stop", "a+1"),
        Fault("commit", "delay", "r7", 2, 0.5),
    )


WRONG = """commit commit: :raise commit:explode comit:raise raise:commit x commit:raise+ commit:kill+-1 commit:kill=1
    commit:delay commit:delay= commit:delay=x commit:delay=-1 commit:delay=601 commit:delay=nan commit:delay=1.2.3"""


@pytest.mark.parametrize("text", WRONG.split())
def test_a_wrong_value_is_refused_with_the_names_of_the_points(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_faults(text)
    assert caught.value.field == "FD_FAULT"
    assert caught.value.message.startswith(
        "expected point:action, point:action+passes or point:action@request-id, got "
    )
    actions = "raise, kill, stop, delay=SECONDS (at most 600)"
    assert caught.value.message.endswith(f"; points: {', '.join(POINTS)}; actions: {actions}")


def reach_in_child(fault: str) -> subprocess.Popen[bytes]:
    """Start a process that arms a fault and reaches the point `commit` twice."""
    code = f"from fastdeploy.core.faults import *; arm(parse_faults({fault!r})); fault_point('commit')\n"
    return subprocess.Popen(
        [sys.executable, "-c", code + "fault_point('commit'); print('passed')"], stdout=subprocess.PIPE
    )


def test_a_fault_kills_the_process() -> None:
    child = reach_in_child("commit:kill+1")
    assert child.communicate(timeout=60) == (b"", None)
    assert child.returncode == -signal.SIGKILL


def test_a_fault_stops_the_process_until_it_is_continued() -> None:
    child = reach_in_child("commit:stop")
    _, status = os.waitpid(child.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status) and os.WSTOPSIG(status) == signal.SIGSTOP
    child.send_signal(signal.SIGCONT)
    assert child.communicate(timeout=60) == (b"passed\n", None)


def test_a_fault_delays_its_thread_once(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(faults.time, "sleep", slept.append)
    faults.arm(parse_faults("commit:delay=2.5"))
    assert reached("commit", ["a", "b"]) == []
    faults.arm(())
    assert slept == [2.5]


def test_faults_need_the_debug_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FD_FAULT", "commit:raise")
    with pytest.raises(ConfigError, match="FD_FAULT: is for tests and needs FD_DEBUG=1"):
        read_env()
    monkeypatch.setenv("FD_DEBUG", "1")
    assert read_env().faults == (Fault("commit", "raise"),)


def test_every_point_is_in_the_sources_once() -> None:
    sources = "".join(path.read_text() for path in Path(fastdeploy.__file__).parent.rglob("*.py"))
    assert Counter(re.findall(r'fault_point\(\s*"(\w+)"', sources)) == Counter(POINTS.keys())


def test_the_documentation_lists_every_point() -> None:
    text = (Path(fastdeploy.__file__).parents[1] / "docs" / "contributing" / "testing.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \| ([^|]+) \|$", text, re.MULTILINE)
    assert [(point, f"{process}: {place}") for point, process, place in rows] == list(POINTS.items())
