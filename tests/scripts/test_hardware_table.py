# SPDX-License-Identifier: Apache-2.0
"""The table of docs/guide/hardware.md is that of the registry."""

from __future__ import annotations

from fastdeploy.ops.backends.gpu.backend import GpuBackend
from fastdeploy.ops.registry import entries
from scripts.make_hardware_table import PAGE, RAN_ON, fresh_page, table


def test_the_page_holds_the_table_of_the_registry() -> None:
    assert PAGE.read_text() == fresh_page(), "run python -m scripts.make_hardware_table"


def test_operators_that_a_gpu_has_are_told_from_references() -> None:
    rows = {line.split("`")[1]: line for line in table().splitlines() if "`" in line}
    assert rows.keys() == entries().keys()
    assert {name for name, row in rows.items() if "sm_80, sm_90, sm_100 | yes" in row} == GpuBackend.kernels.keys()
    assert RAN_ON.keys() <= GpuBackend.kernels.keys()
