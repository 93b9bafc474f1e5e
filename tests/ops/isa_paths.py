# SPDX-License-Identifier: Apache-2.0
"""The instruction-set paths, and those that this processor can run."""

import functools
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PATHS = ("portable", "avx2", "avx512", "avx512_bf16")


def run(arguments: list[str], **settings: str) -> subprocess.CompletedProcess[str]:
    """Run this Python with the given arguments and environment variables."""
    environment = {**os.environ, **settings}
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240
    )


@functools.cache
def supported() -> tuple[str, ...]:
    """Return the paths that this processor supports."""
    tried = {
        path: run(["-c", "from fastdeploy.ops.backends.cpu.library import isa; isa()"], FD_CPU_ISA=path)
        for path in PATHS
    }
    assert all(done.returncode == 0 or f"this processor has no '{path}'" in done.stderr for path, done in tried.items())
    return tuple(path for path, done in tried.items() if done.returncode == 0)
