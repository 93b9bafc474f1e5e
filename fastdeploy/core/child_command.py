# SPDX-License-Identifier: Apache-2.0
"""How this package starts processes of its own."""

from __future__ import annotations

import os
import sys

# `python -m` would look for the package in the current directory first: in a checkout beside the installed package.
_CODE = (
    "import sys; sys.path[:] = sys.argv.pop(1).split(':'); import runpy; "
    "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)


def child_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module as `python -m` does, where it imports what this process imports."""
    path = ":".join(os.path.abspath(entry) for entry in sys.path)
    return [sys.executable, "-c", _CODE, path, module, *arguments]
