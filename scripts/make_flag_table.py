# SPDX-License-Identifier: Apache-2.0
"""Writes the tables of docs/guide/flags.md from `fastdeploy.config`: python scripts/make_flag_table.py"""

from __future__ import annotations

from pathlib import Path

from fastdeploy.config.env import VARIABLES
from fastdeploy.config.flags import FLAGS, Flag, FlagClass

PAGE = Path(__file__).resolve().parents[1] / "docs" / "guide" / "flags.md"
BEGIN, END = "<!-- flags: made by scripts/make_flag_table.py -->", "<!-- end of flags -->"
TITLES = {
    FlagClass.HONOURED: ("Honoured", "what it does"),
    FlagClass.NO_EFFECT: ("Accepted without effect, with a line at start-up", "why"),
    FlagClass.REFUSED: ("Refused by name", "why"),
}


def flag_tables() -> str:
    """Return one table per class of flags, and one of the environment."""
    tables = []
    for flag_class, (title, column) in TITLES.items():
        rows = [_row(flag) for flag in FLAGS if flag.flag_class is flag_class]
        tables.append("\n".join([f"## {title}", "", f"| flag | value | {column} |", "| --- | --- | --- |", *rows]))
    variables = [f"| `{name}` | {text} |" for name, text in VARIABLES.items()]
    tables.append("\n".join(["## Environment", "", "| variable | what it does |", "| --- | --- |", *variables]))
    return "\n\n".join(tables)


def with_tables(page: str) -> str:
    """Return the page with fresh tables between its marks."""
    before, rest = page.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n\n{flag_tables()}\n\n{END}{after}"


def _row(flag: Flag) -> str:
    names = f"`{flag.option}`" + (f" `{flag.short}`" if flag.short else "")
    text = flag.help or flag.reason
    neutral = [str(value).lower() if isinstance(value, bool) else str(value) for value in flag.neutral if value != ""]
    if neutral:
        text += f"; accepted: {', '.join(f'`{value}`' for value in neutral)}"
    return f"| {names} | {flag.kind} | {text.replace('|', chr(92) + '|')} |"


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
