# SPDX-License-Identifier: Apache-2.0
"""Which GGUF file is meant: the only one of a folder, or the one that `--gguf-file` names."""

from __future__ import annotations

import glob
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import NoReturn

from fastdeploy.config.packed_checkpoint import HEADER_FILE
from fastdeploy.core.errors import ConfigError
from fastdeploy.gguf.file import part_name, part_number

FLAG = "gguf_file"
SUFFIX = ".gguf"
_MAGIC = b"GGUF"
_MOST_SHOWN = 24


def is_gguf_file(path: Path, field: str) -> bool:
    """Return whether a file is in GGUF format by its name, or by its first bytes if it has no such name.

    Raises:
        ConfigError: it cannot be read; names `field`.
    """
    if not path.is_file():
        return False
    if path.suffix.lower() == SUFFIX:
        return True
    try:
        with path.open("rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError as error:
        raise ConfigError(field, f"cannot read {path}: {error.strerror}") from None


def models_among(names: Iterable[str]) -> list[str]:
    """Return the GGUF models among the names of files, sorted; the lowest part stands for a model in parts."""
    models: dict[tuple[str, int], str] = {}
    for name in sorted(name for name in names if name.lower().endswith(SUFFIX)):
        part = part_number(PurePosixPath(name).name)
        folder = PurePosixPath(name).parent
        models.setdefault((f"{folder / part[0]}", part[2]) if part else (name, 0), name)
    return sorted(models.values())


def only_model(folder: Path, field: str) -> Path | None:
    """Return the GGUF file of a folder without other weights, or None if it has none.

    Raises:
        ConfigError: it has several; names `field`.
    """
    if any(folder.glob("*.safetensors")) or (folder / HEADER_FILE).exists():
        return None
    models = models_among(file.name for file in folder.glob("*"))
    if len(models) > 1:
        choose = "give the path of one of them, or its name with --gguf-file"
        raise ConfigError(field, f"{folder} has {len(models)} GGUF models, {_shown(models)}; {choose}")
    return folder / models[0] if models else None


def named_model(folder: Path, file: str, names: Iterable[str] = (), model: str = "") -> Path:
    """Return a GGUF file of a folder.

    Args:
        file: its path in the folder.
        names: paths of the files that there are, for errors (default: those in the folder).
        model: what the user calls the folder (default: its path).

    Raises:
        ConfigError: there is no such file, or its name leads out of the folder.
    """
    check_file_name(file)
    path = folder / file
    if not path.is_file():
        present = names or (str(found.relative_to(folder)) for found in folder.rglob(f"*{SUFFIX}"))
        refuse_choice(f"{model or folder} has no file {file!r}", present)
    return path


def check_file_name(file: str) -> None:
    """Refuse a name that is no path below a folder.

    Raises:
        ConfigError: it is absolute, or has `..`.
    """
    path = PurePosixPath(file)
    if path.is_absolute() or ".." in path.parts:
        raise ConfigError(FLAG, f"expected the path of a file in the folder or repository, got {file!r}")


def refuse_choice(problem: str, names: Iterable[str]) -> NoReturn:
    """Raise an error that lists what can be chosen."""
    raise ConfigError(FLAG, f"{problem}; its GGUF files: {_shown(models_among(names))}")


def download_patterns(file: str) -> list[str]:
    """Return the patterns of a file of a repository, and of all of its parts."""
    path = PurePosixPath(file)
    part = part_number(path.name)
    if part is None:
        return [glob.escape(file)]
    stem, _, count = part
    return [glob.escape(str(path.with_name(part_name(stem, number, count)))) for number in range(1, count + 1)]


def _shown(models: list[str]) -> str:
    more = f" and {len(models) - _MOST_SHOWN} more" if len(models) > _MOST_SHOWN else ""
    return ", ".join(models[:_MOST_SHOWN]) + more if models else "none"
