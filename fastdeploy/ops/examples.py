# SPDX-License-Identifier: Apache-2.0
"""Seeded random inputs for the examples in the registry."""

import numpy as np
import paddle

from fastdeploy.ops.coded_piece import CodedPiece
from fastdeploy.ops.quantized_form import GROUP_SIZES, QuantizedForm

CODED_FORMS = tuple(
    QuantizedForm(quantization, group_size, has_minimum)
    for index, group_size in enumerate(GROUP_SIZES)
    for has_minimum in (False, True)
    for quantization in (("wint8", "w4a8"), ("w8a8", "wint4"))[(index + has_minimum) % 2]
)
"""Each way in which weights that are quantized already are packed."""


def random_rows(rows: int, size: int, dtype: str, seed: int, scale: float = 1.0) -> paddle.Tensor:
    """Return [rows, size] normal values times `scale`, rounded to `dtype`."""
    values = np.random.default_rng(seed).standard_normal((rows, size), dtype=np.float32) * np.float32(scale)
    return paddle.to_tensor(values).astype(dtype)


def random_codes(rows: int, size: int, form: QuantizedForm, seed: int) -> CodedPiece:
    """Return codes of the whole range, with scales of both signs; some are 0 or subnormal in float16."""
    generator = np.random.default_rng(seed)
    low = 0 if form.has_minimum else -(2 ** (form.weight_bits - 1))
    codes = generator.integers(low, low + 2**form.weight_bits, (rows, size))
    shape = rows, -(-size // form.group_size) if form.group_size else 1
    scales = generator.choice([-1.0, 1.0], shape) * 2.0 ** generator.uniform(-9, -5, shape)
    scales[0, -1], scales[-1, -1] = 3 * 2.0**-24, 0.0
    minimums = generator.standard_normal(shape) * 0.1
    return CodedPiece(
        paddle.to_tensor(codes.astype(np.uint8 if form.has_minimum else np.int8)),
        paddle.to_tensor(scales.astype(np.float16)),
        paddle.to_tensor(minimums.astype(np.float16)) if form.has_minimum else None,
        form.group_size,
    )
