# SPDX-License-Identifier: Apache-2.0
"""What the tests of the demonstration models' training share."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture(scope="module")
def scripts_on_path() -> Iterator[None]:
    """Make `demo_model` importable as train_demo_model.py sees it; run what it compiles as it is."""
    import torch

    sys.path.insert(0, str(SCRIPTS))
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")
    sys.path.remove(str(SCRIPTS))
