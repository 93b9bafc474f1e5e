# SPDX-License-Identifier: Apache-2.0
"""Records the native operators that are called from Python."""

from __future__ import annotations

import pkgutil
from importlib import import_module
from typing import Any

import pytest

from fastdeploy.ops.backends import cpu


def record_operator_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that receives the name of every operator called from now on; replays of graphs are not calls."""
    calls: list[str] = []
    for info in pkgutil.iter_modules(cpu.__path__):
        module: Any = import_module(f"{cpu.__name__}.{info.name}")
        run_native = getattr(module, "run_native", None)
        if run_native is None:
            continue

        def note(name: str, *arguments: Any, run: Any = run_native) -> Any:
            calls.append(name)
            return run(name, *arguments)

        monkeypatch.setattr(module, "run_native", note)
    return calls
