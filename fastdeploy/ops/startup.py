# SPDX-License-Identifier: Apache-2.0
"""What a device needs before Paddle is imported. Nothing here imports Paddle."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec


def prepare(device: str) -> None:
    """Let the backend of a device, such as "gpu:1", prepare the process; to be called before anything imports Paddle.

    Raises:
        ConfigError: the device cannot be used, or Paddle has been imported too early.
    """
    name = f"fastdeploy.ops.backends.{device.partition(':')[0]}"
    if find_spec(name) is not None and find_spec(f"{name}.plugin") is not None:
        import_module(f"{name}.plugin").prepare(device)
