# SPDX-License-Identifier: Apache-2.0
"""A fault point does nothing unless it is armed, and then raises once, for the request that it is armed for."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

import fastdeploy
from fastdeploy.config.env import read_env
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


@pytest.mark.parametrize("text", ["commit", "commit:", ":raise", "commit:explode", "comit:raise", "raise:commit", "x"])
def test_a_wrong_value_is_refused_with_the_names_of_the_points(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_faults(text)
    assert caught.value.field == "FD_FAULT"
    assert caught.value.message.startswith("expected point:action or point:action@request-id, got ")
    assert caught.value.message.endswith(f"; points: {', '.join(POINTS)}; actions: raise")


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
