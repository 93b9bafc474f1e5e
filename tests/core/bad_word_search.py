# SPDX-License-Identifier: Apache-2.0
"""The rule of bad words in its simplest form, with which the automaton is compared."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def search_banned_ids(bad_words: Iterable[Sequence[int]], context: Sequence[int]) -> set[int]:
    """Return the last ids of the bad words whose other ids end the context."""
    return {word[-1] for word in bad_words if list(context[len(context) - len(word) + 1 :]) == list(word[:-1])}
