# SPDX-License-Identifier: Apache-2.0
"""Property tests try the same examples in every run, and the quick tests are marked."""

from __future__ import annotations

import pytest
from hypothesis import settings

from tests.quick import mark_quick

settings.register_profile("same-examples", derandomize=True, deadline=None)  # no test asserts a time
settings.load_profile("same-examples")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the quick tests, before pytest selects by marker."""
    mark_quick(items)
