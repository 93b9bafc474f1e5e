# SPDX-License-Identifier: Apache-2.0
"""Random weights of codes, scales and minimums."""

import numpy as np
import paddle

from fastdeploy.ops.coded_piece import CodedPiece


def random_coded(
    outputs: int, inputs: int, bits: int, group_size: int, has_minimum: bool, seed: int, dtype: str = "float16"
) -> CodedPiece:
    """Return codes of the whole range, with scales of many sizes: 0, subnormal ones, negative ones and 200."""
    generator = np.random.default_rng(seed)
    low, high = (0, 2**bits) if has_minimum else (-(2 ** (bits - 1)), 2 ** (bits - 1))
    codes = generator.integers(low, high, (outputs, inputs)).astype(np.uint8 if has_minimum else np.int8)
    shape = outputs, -(-inputs // group_size) if group_size else 1
    scales = (generator.choice([-1.0, 1.0], shape) * 2.0 ** generator.uniform(-9, -5, shape)).astype(np.float16)
    for value, output in ((0.0, 1), (2.0**-24, 2), (3 * 2.0**-20, 3), (200.0, 4)):
        if output < outputs:
            scales[output, -1] = value
    minimums = (generator.standard_normal(shape) * 0.1).astype(np.float16) if has_minimum else None
    return CodedPiece(
        paddle.to_tensor(codes),
        paddle.to_tensor(scales).astype(dtype),
        None if minimums is None else paddle.to_tensor(minimums).astype(dtype),
        group_size,
    )
