# SPDX-License-Identifier: Apache-2.0
"""What a flag is: its name, its type, and what becomes of it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

SERVER = "server"


class FlagClass(Enum):
    """What becomes of a flag."""

    HONOURED = "honoured"
    REFUSED = "refused"
    NO_EFFECT = "accepted without effect"


@dataclass(frozen=True)
class Flag:
    """One flag.

    Attributes:
        name: snake_case; on the command line `--name-with-hyphens`.
        kind: type of its value: str, int, float, bool, json, list, or bytes (an integer with k, M, G or Ki, Mi, Gi).
        help: what it does.
        section: part of the configuration that it belongs to: server, or engine, cache, scheduler, speculative, which
            `LLM` has too.
        field: name of the value in that part; empty: the flag's own name.
        flag_class: what becomes of it.
        reason: why it is refused or has no effect.
        neutral: values that ask for nothing and so are accepted from a refused flag.
        low, high: range of a number where the configuration does not check it itself.
        is_secret: its value is shown nowhere.
        short: further spelling on the command line.
    """

    name: str
    kind: str = "str"
    help: str = ""
    section: str = "engine"
    field: str = ""
    flag_class: FlagClass = FlagClass.HONOURED
    reason: str = ""
    neutral: tuple[Any, ...] = ()
    low: float | None = None
    high: float | None = None
    is_secret: bool = False
    short: str = ""

    @property
    def option(self) -> str:
        """Spelling on the command line."""
        return "--" + self.name.replace("_", "-")

    @property
    def is_server(self) -> bool:
        """True for flags of the HTTP server, which `LLM` does not have."""
        return self.section == SERVER
