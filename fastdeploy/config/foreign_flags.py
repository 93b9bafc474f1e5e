# SPDX-License-Identifier: Apache-2.0
"""Reads data/foreign_flags.toml: flags of FastDeploy 2.x, vLLM and llama.cpp, and what becomes of them here."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from fastdeploy.config.flag import SERVER, Flag, FlagClass, integer, number

_TABLES = {"mapped": FlagClass.MAPPED, "no_effect": FlagClass.NO_EFFECT, "refused": FlagClass.REFUSED}
DATA = Path(__file__).with_name("data") / "foreign_flags.toml"


def read_foreign_flags() -> tuple[Flag, ...]:
    """Return the flags of the data file, in its order."""
    content = tomllib.loads(DATA.read_text(encoding="utf-8"))
    return tuple(
        _make_flag(name, flag_class, group["reason"], **keys)
        for table, flag_class in _TABLES.items()
        for group in content[table]
        for name, keys in group["flags"].items()
    )


def _make_flag(name: str, flag_class: FlagClass, reason: str, kind: str = "str", **keys: Any) -> Flag:
    """Return a flag with the keys that the data file describes."""
    values: dict[str, Any] = {"name": name, "flag_class": flag_class, "reason": reason}
    values |= {"neutral": tuple(keys.pop("neutral", ())), "is_secret": keys.pop("secret", False)}
    values |= {"section": SERVER if keys.pop("server", False) else "engine", "short": keys.pop("short", "")}
    values["refused_on_gpu"] = keys.pop("refused_on_gpu", "")
    if kind == "int":
        return integer(**keys, **values)
    return number(**keys, **values) if kind == "float" else Flag(kind, **keys, **values)
