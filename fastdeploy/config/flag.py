# SPDX-License-Identifier: Apache-2.0
"""A flag: its name, its type, and whether it is honoured."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

SERVER = "server"


class FlagClass(Enum):
    """Whether a flag is honoured."""

    HONOURED = "honoured"
    REFUSED = "refused"
    NO_EFFECT = "accepted without effect"


@dataclass(frozen=True)
class Flag:
    """One flag.

    Attributes:
        name: snake_case; on the command line `--name-with-hyphens`.
        kind: type of its value, a key of `convert.KINDS`.
        help: what it does, with its default.
        section: the configuration that it belongs to: engine, cache, scheduler or speculative, which are arguments of
            `LLM` too, or server.
        field: its field in that configuration.
        flag_class: whether it is honoured.
        reason: why it is refused or has no effect.
        neutral: values that are accepted from a refused flag, because they request nothing.
        low, high: valid range of a number, for flags that are not honoured.
        is_secret: its value is never shown.
        short: an additional spelling on the command line.
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
        """Return its spelling on the command line."""
        return "--" + self.name.replace("_", "-")

    @property
    def is_server(self) -> bool:
        """Return whether it is a flag of the HTTP server, which `LLM` does not have."""
        return self.section == SERVER
