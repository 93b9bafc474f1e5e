# SPDX-License-Identifier: Apache-2.0
"""Parser of a command line in which a flag has exactly the names that it was declared with."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import Any

LEVEL = re.compile(r"-O(?=\d)")
"""vLLM's optimization level, the only flag whose value may follow it without a space."""


class ExactParser(argparse.ArgumentParser):
    """A parser that never guesses which flag was meant.

    argparse, even with `allow_abbrev=False`, takes `-t` for `--t...` written with one hyphen, `-n4` for `-n 4`, and
    `-e=p` for `-e -p` where `-e` has no value. Here all of these are errors.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def parse_exactly(self, tokens: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
        """Return the values of the flags, and the tokens that belong to none."""
        tokens = [LEVEL.sub("-O=", token) for token in tokens]
        for token in tokens:
            name, equals, value = token.partition("=")
            action = self._option_string_actions.get(name)
            if equals and action is not None and action.nargs == 0:
                self.error(f"argument {name}: takes no value, got {value!r}")
        return self.parse_known_args(tokens)

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        """Return no candidates for a flag that has no exact match; argparse would look for abbreviations."""
        return []
