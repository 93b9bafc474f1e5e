# SPDX-License-Identifier: Apache-2.0
"""What a device needs before Paddle is imported, and a thread before it calls Paddle. The import imports no Paddle."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
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


@contextmanager
def paddle_thread() -> Iterator[None]:
    """Let the block call Paddle and operators, whichever thread it runs in.

    Paddle's dynamic mode and the current device belong to a thread. A thread begins with what the process used last,
    and when the thread that imported Paddle ends, that is the static mode and no device.
    """
    import paddle

    from fastdeploy.ops.registry import activate_device

    with nullcontext() if paddle.in_dynamic_mode() else paddle.base.dygraph.guard():
        activate_device()
        yield
