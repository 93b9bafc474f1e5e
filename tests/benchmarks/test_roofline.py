# SPDX-License-Identifier: Apache-2.0
"""Readings of the machine read memory, not caches."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.roofline import Reading, Roofline, buffer_bytes, last_level_cache_bytes, median_of

MIB = 1 << 20


@pytest.mark.parametrize(
    ("cache_mib", "available_mib", "expected"),
    [
        (0, 8192, (256, 256)),
        (32, 8192, (256, 256)),
        (260, 8192, (1040, 260)),
        (1024, 65536, (4096, 1024)),
        (1024, 8192, (2048, 1024)),
        (260, 100, (260, 260)),
    ],
)
def test_the_buffer_is_four_times_the_cache_within_a_quarter_of_the_memory(
    cache_mib: int, available_mib: int, expected: tuple[int, int]
) -> None:
    found = buffer_bytes(cache_mib * MIB, available_mib * MIB)
    assert found == (expected[0] * MIB, expected[1] * MIB)


def test_the_largest_cache_counts(tmp_path: Path) -> None:
    assert last_level_cache_bytes(tmp_path) == 0
    for index, size in enumerate(("48K", "2048K", "260M", "32K")):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}/size").write_text(size + "\n")
    assert last_level_cache_bytes(tmp_path) == 260 * MIB


def test_the_floor_is_the_longer_of_reading_and_arithmetic() -> None:
    reading = Reading(bytes_per_s=10.0, bf16_per_s=100.0, int8_per_s=400.0)
    assert reading.floor_s(50, 100) == 5.0
    assert reading.floor_s(10, 100, 800) == 3.0, "products of both kinds follow one another"


def test_every_window_of_the_buffer_is_read_before_the_first_again(
    small_readings: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.roofline.last_level_cache_bytes", lambda: MIB)
    roofline, starts = Roofline(), []
    for _ in range(5):
        starts.append(roofline._next)
        reading = roofline.measure()
        assert min(reading.bytes_per_s, reading.bf16_per_s, reading.int8_per_s) > 0
    assert starts == [0, MIB, 2 * MIB, 3 * MIB, 0]
    assert roofline.median == median_of(roofline.readings)
    assert roofline.describe()["read_buffer_mib"] == 4.0
