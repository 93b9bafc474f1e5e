# SPDX-License-Identifier: Apache-2.0
"""Writes the tables of docs/guide/flags.md and docs/guide/speculation.md: python scripts/make_flag_table.py"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from fastdeploy.config.env import VARIABLES
from fastdeploy.config.flag import flags_of
from fastdeploy.config.flags import FLAG_BY_NAME, FLAGS, Flag, FlagClass, default_text
from fastdeploy.config.speculative_config import CONFIGS

GUIDE = Path(__file__).resolve().parents[1] / "docs" / "guide"
BEGIN, END = "<!-- table: made by scripts/make_flag_table.py -->", "<!-- end of table -->"
TITLES = {
    FlagClass.HONOURED: ("Honoured", "what it does"),
    FlagClass.MAPPED: ("Names of vLLM and llama.cpp for these flags", "stands for"),
    FlagClass.NO_EFFECT: ("Accepted without effect, with a line at start-up", "why"),
    FlagClass.REFUSED: ("Refused by name", "why"),
}


def flag_tables() -> str:
    """Return one table per class of flags, and one of the environment."""
    tables = []
    for flag_class, (title, column) in TITLES.items():
        rows = [_flag_row(flag) for flag in FLAGS if flag.flag_class is flag_class]
        tables.append(f"## {title}\n\n{_table(['flag', 'value', column], rows)}")
    variables = [[f"`{name}`", text] for name, text in VARIABLES.items()]
    tables.append(f"## Environment\n\n{_table(['variable', 'what it does'], variables)}")
    return "\n\n".join(tables)


def key_table() -> str:
    """Return the table of the keys of speculative_config that methods have."""
    methods_by_key: dict[str, list[str]] = {}
    for method, config in CONFIGS.items():
        for key in flags_of(config):
            methods_by_key.setdefault(key, []).append(method)
    rows = [_key_row(key, methods) for key, methods in methods_by_key.items()]
    return _table(["key", "methods", "value", "meaning"], rows)


def fresh_pages() -> dict[Path, str]:
    """Return the pages with fresh tables between their marks."""
    pages = {}
    for name, table in (("flags.md", flag_tables()), ("speculation.md", key_table())):
        before, rest = (GUIDE / name).read_text().split(BEGIN)
        pages[GUIDE / name] = f"{before}{BEGIN}\n\n{table}\n\n{END}{rest.split(END)[1]}"
    return pages


def _flag_row(flag: Flag) -> list[str]:
    names = " ".join(f"`{name}`" for name in flag.spellings)
    text = flag.help or flag.reason
    if flag.flag_class is FlagClass.MAPPED:
        text = f"{_targets(flag)}: {flag.reason}"
    neutral = [str(value).lower() if isinstance(value, bool) else str(value) for value in flag.neutral if value != ""]
    if neutral:
        text += f"; accepted: {', '.join(f'`{value}`' for value in neutral)}"
    return [names, flag.kind, text]


def _targets(flag: Flag) -> str:
    """Return the flags that a mapped flag stands for."""
    return ", ".join(f"`{FLAG_BY_NAME[name].option}`" for name in flag.keys.values() or [flag.target])


def _key_row(key: str, methods: list[str]) -> list[str]:
    """Return a row; where methods have different defaults, it shows each."""
    shown = "all" if len(methods) == len(CONFIGS) else ", ".join(f"`{method}`" for method in methods)
    methods_by_default: dict[Any, list[str]] = {}
    for method in methods:
        default = inspect.signature(CONFIGS[method]).parameters[key].default
        methods_by_default.setdefault(default, []).append(f"`{method}`")
    flag, default = flags_of(CONFIGS[methods[-1]])[key], default_text(next(iter(methods_by_default)))
    if len(methods_by_default) > 1:
        given = {value: names for value, names in methods_by_default.items() if value is not None}
        default = "; ".join(f"{', '.join(names)} {value}" for value, names in given.items())
        default = f" (default: {default})"
    return [f"`{key}`", shown, flag.expected, flag.help + default]


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    for path, text in fresh_pages().items():
        path.write_text(text)
