# SPDX-License-Identifier: Apache-2.0
"""The quick tests come from every package, and the list of slow modules names files that exist."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from tests.quick import TESTS, mark_quick, slow_files


class Item(SimpleNamespace):
    """A collected test as `mark_quick` sees it."""

    def add_marker(self, name: str) -> None:
        self.markers.append(name)

    def get_closest_marker(self, name: str) -> str | None:
        return name if name in self.markers else None


def quick_names(file: str, *names: str, markers: tuple[str, ...] = ()) -> list[str]:
    items = [Item(path=TESTS / file, name=name, markers=list(markers)) for name in names]
    mark_quick(items)  # type: ignore[arg-type]
    return [item.name for item in items if "quick" in item.markers]


def test_two_cases_of_each_test_are_quick() -> None:
    names = ["test_a[1]", "test_a[2]", "test_a[3]", "test_b", "test_c[x]"]
    assert quick_names("core/test_x.py", *names) == ["test_a[1]", "test_a[2]", "test_b", "test_c[x]"]


def test_slow_modules_and_nightly_tests_are_not_quick() -> None:
    assert quick_names("ops/test_paths.py", "test_a") == []
    assert quick_names("core/test_x.py", "test_a", markers=("nightly",)) == []


def test_slow_modules_exist() -> None:
    assert [file for file in sorted(slow_files()) if not file.exists()] == []


def test_every_package_has_quick_tests() -> None:
    files = list(TESTS.rglob("test_*.py"))
    packages = {package_of(file) for file in files}
    assert len(packages) >= 15
    assert packages == {package_of(file) for file in files if file not in slow_files()}


def package_of(file: Path) -> str:
    return file.relative_to(TESTS).parts[0]
