# SPDX-License-Identifier: Apache-2.0
"""The plug-in counts what Paddle asks of the device, so that a test can see an operator of Paddle in a step."""

from __future__ import annotations

import os
import subprocess
import sys

SCRIPT = """
from fastdeploy.ops.startup import prepare
prepare("gpu")
import paddle
from fastdeploy.ops import registry
registry.select_backend("gpu")
from fastdeploy.ops.attention import allocate_kv_cache
from fastdeploy.ops.backends.gpu.library import active
library = active()
def count(call):
    before = library.paddle_counters()
    kept = call()
    return library.paddle_counters().since(before)
tensor = paddle.ones([2], "int32")
assert min(count(lambda: paddle.zeros([2**20]))) > 0, "an allocation, a copy and a wait"
_, copies, waits = count(lambda: tensor + tensor)
assert copies > 0 and waits > 0, "an operator of Paddle runs on the CPU"
def write_counts():
    library.launch("fd_write_counts", tensor, 3, 2)
    library.call("fd_device_stream_sync", library.stream)
assert count(write_counts) == (0, 0, 0), "what the library does itself is not counted"
assert tensor.numpy().tolist() == [3, 2]
caches = []
_, copies, _ = count(lambda: caches.append(allocate_kv_cache(4, 16, 2, 64, "int8")))
assert copies == 0, "the device fills a KV cache with zeros; the host may have less memory"
assert not caches[0].key.numpy().any() and not caches[0].value.numpy().any()
"""


def test_what_paddle_asks_of_the_emulated_device_is_counted() -> None:
    environment = {**os.environ, "FD_GPU_EMULATED": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0, done.stderr
