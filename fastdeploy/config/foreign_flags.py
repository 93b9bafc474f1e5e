# SPDX-License-Identifier: Apache-2.0
"""Flags of FastDeploy 2.x and vLLM that have no effect here or are refused, read from data/foreign_flags.toml."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fastdeploy.config.flag import SERVER, Flag, FlagClass

DATA = Path(__file__).with_name("data") / "foreign_flags.toml"


def read_foreign_flags() -> tuple[Flag, ...]:
    """Return the flags of the data file, in its order."""
    groups = tomllib.loads(DATA.read_text(encoding="utf-8"))
    return (
        *_flags(groups["no_effect"], FlagClass.NO_EFFECT),
        *_flags(groups["refused"], FlagClass.REFUSED),
    )


def _flags(groups: list[Mapping[str, Any]], flag_class: FlagClass) -> Iterator[Flag]:
    for group in groups:
        for name, keys in group["flags"].items():
            yield Flag(
                name,
                keys.get("kind", "str"),
                section=SERVER if keys.get("server") else "engine",
                flag_class=flag_class,
                reason=group["reason"],
                neutral=tuple(keys.get("neutral", ())),
                low=keys.get("low"),
                high=keys.get("high"),
                is_secret=keys.get("secret", False),
                short=keys.get("short", ""),
            )
