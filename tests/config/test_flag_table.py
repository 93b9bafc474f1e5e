# SPDX-License-Identifier: Apache-2.0
"""The documentation's tables of flags and keys are the code's."""

from __future__ import annotations

from scripts.make_flag_table import GUIDE, fresh_pages


def test_pages_hold_the_tables_that_the_configuration_makes() -> None:
    pages = fresh_pages()
    for path, text in pages.items():
        assert path.read_text() == text, "run python scripts/make_flag_table.py"
    assert "| `--max-model-len` | tokens_or_auto |" in pages[GUIDE / "flags.md"]
    assert "| `max_ngram_size` | `ngram` | an integer in [1, 16] |" in pages[GUIDE / "speculation.md"]
