# SPDX-License-Identifier: Apache-2.0
"""The thread pool: concurrent callers, and a forked child."""

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import paddle

from fastdeploy.ops.examples import random_rows
from fastdeploy.ops.linear import linear, pack_linear
from tests.ops.bits import bits


def test_concurrent_callers_get_the_same_results_as_single_callers() -> None:
    weight = pack_linear(random_rows(512, 256, "bfloat16", 1))
    inputs = [random_rows(8, 256, "bfloat16", seed) for seed in range(6)]

    def call(x: paddle.Tensor) -> np.ndarray:
        out = paddle.zeros([8, 512], "bfloat16")
        for _ in range(50):
            linear(x, weight, out, 8)
        return bits(out)

    alone = [call(x) for x in inputs]
    with ThreadPoolExecutor(3) as callers:
        together = list(callers.map(call, inputs))
    assert all(np.array_equal(a, b) for a, b in zip(alone, together, strict=True))


def test_a_forked_child_computes_with_its_own_threads() -> None:
    weight, x = pack_linear(random_rows(512, 256, "float32", 1)), random_rows(8, 256, "float32", 2)
    out = paddle.zeros([8, 512], "float32")
    linear(x, weight, out, 8)
    expected = bits(out).tobytes()
    out.zero_()
    child = os.fork()
    if child == 0:
        linear(x, weight, out, 8)
        os._exit(0 if bits(out).tobytes() == expected else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
