# SPDX-License-Identifier: Apache-2.0
"""What to do about a native library that is not where the package was imported from."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from importlib.metadata import Distribution, distributions
from pathlib import Path
from urllib.parse import unquote, urlsplit


def missing_library(library: Path) -> str:
    """Return the error about a library that does not exist: where it was expected, and what to do.

    A checkout in the current folder hides an installed package, so an installation that has the library is named.
    """
    expected = f"expected {library.name} in {library.parent}, got none"
    checkout = library.parents[2]
    if not (checkout / "setup.py").exists():
        return f"{expected}; reinstall the package, or build it with `pip install -e .` in a checkout"
    installed = next((folder for folder in _packages() if (folder / "ops" / library.name).exists()), None)
    if installed is None:
        return f"{expected}; build it with `pip install -e .` in the checkout {checkout} (needs g++ and Python.h)"
    return (
        f"{expected}; this is the checkout, the installed package is at {installed}: change the folder, or install the "
        f"checkout with `pip install -e {shlex.quote(str(checkout))}`"
    )


def _packages() -> Iterator[Path]:
    """Yield the folder of the package of every installation that Python can see."""
    for installation in distributions(name="fastdeploy"):
        yield Path(str(installation.locate_file("fastdeploy"))).absolute()
        project = _editable_project(installation)
        if project is not None:
            yield project / "fastdeploy"


def _editable_project(installation: Distribution) -> Path | None:
    """Return the checkout that an editable installation runs from; None for another kind of installation."""
    origin = json.loads(installation.read_text("direct_url.json") or "{}")  # PEP 610
    if not origin.get("dir_info", {}).get("editable"):
        return None
    return Path(unquote(urlsplit(origin["url"]).path))
