# SPDX-License-Identifier: Apache-2.0
"""Standard streams of a process that was started with some of them closed."""

from __future__ import annotations

import os
import sys

_STREAMS = (("stdin", os.O_RDONLY, "r"), ("stdout", os.O_WRONLY, "w"), ("stderr", os.O_WRONLY, "w"))


def open_standard_streams() -> None:
    """Open /dev/null on those of the descriptors 0 to 2 that are free; to be called before anything else opens a file.

    Otherwise a socket or a weight file would get one of these numbers, and libraries and child processes would read or
    write it as their standard stream.
    """
    for descriptor, (name, flags, mode) in enumerate(_STREAMS):
        if _is_free(descriptor):
            opened = os.open(os.devnull, flags)
            if opened != descriptor:
                os.dup2(opened, descriptor)
                os.close(opened)
            os.set_inheritable(descriptor, True)
        if getattr(sys, name) is None:
            stream = open(descriptor, mode, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


def _is_free(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return True
    return False
