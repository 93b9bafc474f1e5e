# SPDX-License-Identifier: Apache-2.0
"""A copy of the checkout to build and install from, and environments that share the dependencies of the tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("custom_ops", "fastdeploy", "setup.py", "pyproject.toml", "requirements.txt", "README.md", "LICENSE")
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def run(folder: Path, *command: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder, whose package it would import if there is one."""
    return subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=folder, env=ENVIRONMENT, timeout=240
    )


def copy_sources(folder: Path) -> Path:
    """Copy the sources without what earlier builds left in them; compiled objects are shared. Return the folder."""
    folder.mkdir()
    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, folder / name)
    for library in (folder / "fastdeploy" / "ops").glob("*.so"):
        library.unlink()
    (folder / "build").mkdir()
    (ROOT / "build" / "objects").mkdir(parents=True, exist_ok=True)
    (folder / "build" / "objects").symlink_to(ROOT / "build" / "objects")
    return folder


def share_dependencies(environment: Path, folder: Path) -> None:
    """Let an environment import what the tests import, but for the package, through links in a new folder."""
    folder.mkdir()
    for entry in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if "fastdeploy" not in entry.name:
            (folder / entry.name).symlink_to(entry)
    [packages] = (environment / "lib").glob("python*/site-packages")
    (packages / "dependencies.pth").write_text(str(folder))
