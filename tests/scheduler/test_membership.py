# SPDX-License-Identifier: Apache-2.0
"""What a node reads of other processes with its id, and of nodes of other groups, before and while it works."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from fastdeploy.core.errors import ConfigError
from fastdeploy.kv_cache.connectors.base import Host
from fastdeploy.scheduler.membership import Membership, describe_difference
from fastdeploy.scheduler.messages import NodeRecord
from fastdeploy.scheduler.request_states import Limits, Role
from fastdeploy.scheduler.store import Store

PARTS = {"isa": "'avx2'", "max_model_len": "2048"}


class FakeStore:
    """Returns one record after the other, the last one for ever."""

    def __init__(self, *records: NodeRecord | None, is_foreign: bool = False) -> None:
        self.foreign_records: dict[str, NodeRecord] = {}
        self._records, self._is_foreign = list(records), is_foreign

    async def read_nodes(self) -> dict[str, NodeRecord]:
        record = self._records.pop(0) if len(self._records) > 1 else self._records[0]
        found = {} if record is None else {"n": record}
        self.foreign_records = found if self._is_foreign else {}
        return {} if self._is_foreign else found


def make_record(count: int = 1, group: str = "g", incarnation: int = 7, **fields: Any) -> NodeRecord:
    return NodeRecord(count, incarnation, Role.MIXED, group, Host("boot", "net", 0), **fields)


def make_membership(store: FakeStore) -> Membership:
    return Membership("n", make_record(parts=PARTS), Limits(expire_s=0.1), cast(Store, store), cast(Any, None))


@pytest.mark.parametrize("is_foreign", [False, True])
def test_a_new_process_gets_the_record_of_the_former_one_whatever_its_group(is_foreign: bool) -> None:
    old = make_record()
    for store in (FakeStore(old, old, None, is_foreign=is_foreign), FakeStore(old, is_foreign=is_foreign)):
        assert asyncio.run(make_membership(store).wait_alone()) == old, "also if the clock of Redis keeps its key"
    assert asyncio.run(make_membership(FakeStore(None)).wait_alone()) is None
    with pytest.raises(ConfigError, match="another live node has the id 'n'"):
        asyncio.run(make_membership(FakeStore(old, make_record(2), is_foreign=is_foreign)).wait_alone())


def test_of_two_living_processes_the_one_with_the_larger_incarnation_leaves() -> None:
    earlier, later = make_membership(FakeStore(None)), make_membership(FakeStore(None))
    earlier._incarnations, later._incarnations = {7, 8}, {9}
    for _ in range(5):
        earlier._check_alone(make_record(incarnation=9))
    later._check_alone(make_record(incarnation=7))
    later._check_alone(make_record(incarnation=9))
    later._check_alone(make_record(incarnation=8))
    with pytest.raises(ConfigError):
        later._check_alone(make_record(incarnation=8))


def test_a_node_says_once_of_each_other_group_which_part_differs(caplog: pytest.LogCaptureFixture) -> None:
    store = FakeStore(None)
    membership = make_membership(store)
    other = make_record(group="h", parts=PARTS | {"isa": "'avx512'"})
    for _ in range(3):
        store.foreign_records = {"a": other, "b": other}
        membership._warn_of_foreign_groups()
    assert caplog.messages == [
        "node a belongs to another group, with which this node exchanges no requests: "
        "isa is 'avx512' there and 'avx2' here"
    ]
    store.foreign_records = {"c": make_record(group="i", version="0.1")}
    membership._warn_of_foreign_groups()
    assert caplog.messages[1].endswith(": it runs version 0.1")


def test_parts_that_only_one_node_knows_are_shown_and_a_long_list_is_cut() -> None:
    assert (
        describe_difference({"a": "1"}, {"b": "2"}, "v")
        == "a is not known there and 1 here; b is 2 there and not known here"
    )
    many = {f"part{index}": "1" for index in range(6)}
    assert describe_difference(many, {name: "2" for name in many}, "v").endswith("1 here; and 2 more parts differ")
