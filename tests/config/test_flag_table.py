# SPDX-License-Identifier: Apache-2.0
"""The documentation's table of flags is the code's."""

from __future__ import annotations

import runpy
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "make_flag_table.py"


def test_page_holds_the_table_that_the_flags_make() -> None:
    maker = runpy.run_path(str(SCRIPT))
    page = maker["PAGE"].read_text()
    assert page == maker["with_tables"](page), "run python scripts/make_flag_table.py"
    assert "| `--max-model-len` | int |" in page
