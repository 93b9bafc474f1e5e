# SPDX-License-Identifier: Apache-2.0
"""Where do the loops of the roofline come from? Builds custom_ops/roofline, which is not part of the package."""

from __future__ import annotations

import ctypes
import runpy
from functools import lru_cache
from pathlib import Path

from fastdeploy.ops.backends.cpu import library

ROOT = Path(__file__).resolve().parent.parent


@lru_cache(maxsize=1)
def load_loops() -> ctypes.CDLL:
    """Build the loops for the instruction-set path of this process, unless they are up to date, and load them.

    They are linked with the operator library: they use its thread pool and read its captured graphs.

    Raises:
        RuntimeError: the operator library was built from other sources than those of this checkout.
    """
    build = runpy.run_path(str(ROOT / "setup.py"))
    path, operators = library.isa(), library.library_path()
    if library.library_hash() != build["source_hash"]():
        raise RuntimeError(
            f"roofline: {operators.name}: expected a build of the sources in this checkout, got another one; rebuild it"
            " with `python setup.py build_ext --inplace`"
        )
    sources = sorted((ROOT / "custom_ops" / "roofline").glob("*.cc"))
    flags = [f"-L{operators.parent}", f"-l:{operators.name}", f"-Wl,-rpath,{operators.parent}"]
    loops = ctypes.CDLL(str(build["build_for_path"]("roofline", sources, path, flags)))
    loops.fd_multiply_registers.restype = loops.fd_multiply_integers.restype = ctypes.c_double
    return loops
