# SPDX-License-Identifier: Apache-2.0
"""Command lines and environments of child processes."""

from __future__ import annotations

import os
import sys

# `python -m` would look for the package in the current directory first, which may be a checkout of other sources.
_CODE = (
    "import sys; sys.path[:] = sys.argv.pop(1).split(':'); "
    "from fastdeploy.core.standard_streams import open_standard_streams; open_standard_streams(); import runpy; "
    "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)
_PASSED_VARIABLES = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "TZ")


def child_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module like `python -m`, with the import path of this process."""
    path = ":".join(os.path.abspath(entry) for entry in sys.path)
    return [sys.executable, "-c", _CODE, path, module, *arguments]


def child_environment() -> dict[str, str]:
    """Return the environment of a process that works on what clients send: no keys or passwords."""
    return {name: os.environ[name] for name in _PASSED_VARIABLES if name in os.environ}
