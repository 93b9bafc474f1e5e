# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests of models."""

from __future__ import annotations

from typing import Any

import pytest

from fastdeploy.models import mtp
from fastdeploy.models.mtp import collect_mtp_weights


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[list[mtp.MTPWeights]]:
    """Return a list that gets the weights of all layers for multi-token prediction that are loaded."""
    loaded: list[list[mtp.MTPWeights]] = []

    def collect(*arguments: Any) -> list[mtp.MTPWeights]:
        loaded.append(collect_mtp_weights(*arguments))
        return loaded[-1]

    monkeypatch.setattr(mtp, "collect_mtp_weights", collect)
    return loaded
