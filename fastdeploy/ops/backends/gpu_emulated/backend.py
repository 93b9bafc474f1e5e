# SPDX-License-Identifier: Apache-2.0
"""The emulated GPU as a backend: that of the GPU with another library."""

from __future__ import annotations

from pathlib import Path

from fastdeploy.config.env import read_env
from fastdeploy.ops.backends.gpu import plugin
from fastdeploy.ops.backends.gpu.backend import GpuBackend


class EmulatedGpuBackend(GpuBackend):
    """The GPU's kernels on the CPU."""

    needs_check = False  # the tests execute every kernel
    is_emulated = True
    peak_bytes, peak_steps = 1 << 16, 16

    def library_path(self) -> Path:
        """Build the emulated library if its sources have changed."""
        return plugin.build_emulated(read_env().emulation_checks)

    def load(self) -> None:
        """Load the library and set the order in which it runs blocks and threads."""
        super().load()
        env = read_env()
        assert self.library is not None
        self.library.call_void("fd_emulation_configure", env.emulation_seed, env.emulation_checks)

    def describe(self) -> dict[str, str]:
        """Return what the GPU's backend says, and that the device is emulated."""
        return {**super().describe(), "isa": "emulated"}


BACKEND = EmulatedGpuBackend()
