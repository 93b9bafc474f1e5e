# SPDX-License-Identifier: Apache-2.0
"""Native unpacking, widening and conversion of codes equal their definitions in NumPy."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import paddle
import pytest
from numpy.typing import NDArray

from fastdeploy.ops.grouped_codes import GroupedCodes, convert_codes, run_size, unpack_codes, widen_codes

SHAPES = [(1, 1), (3, 31), (5, 32), (7, 129), (300, 576), (2, 70001)]


@pytest.mark.parametrize("is_signed", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shape", SHAPES)
def test_codes_are_unpacked_from_the_lowest_bits_on(
    shape: tuple[int, int], bits: Literal[4, 8], is_signed: bool
) -> None:
    outputs, inputs = shape
    row_bytes = -(-inputs * bits // 32) * 4
    packed = np.random.default_rng(1).integers(0, 256, (outputs, row_bytes)).astype(np.uint8)
    both = np.stack([packed & 15, packed >> 4], axis=-1).reshape(outputs, -1) if bits == 4 else packed
    expected = both[:, :inputs].astype(int) - (2 ** (bits - 1) if is_signed else 0)
    found = unpack_codes(packed, inputs, bits, is_signed)
    assert found.dtype == (np.int8 if is_signed else np.uint8)
    np.testing.assert_array_equal(found, expected)


def random_codes(shape: tuple[int, int], num_groups: int, is_signed: bool, has_zeros: bool) -> GroupedCodes:
    """Return codes of the whole range; which group an input belongs to is random in some places."""
    generator = np.random.default_rng(2)
    low = -128 if is_signed else 0
    codes: Any = generator.integers(low, low + 256, shape).astype(np.int8 if is_signed else np.uint8)
    groups = np.sort(generator.integers(0, num_groups, shape[1])).astype(np.int32)
    generator.shuffle(groups[shape[1] // 2 :])
    scales = (2.0 ** generator.uniform(-12, 3, (shape[0], num_groups))).astype(np.float32)
    zeros = generator.integers(0, 256, scales.shape).astype(np.float32) if has_zeros else None
    return GroupedCodes(codes, scales, zeros, groups)


def values_of(coded: GroupedCodes) -> NDArray[np.float32]:
    """Return the weights by definition."""
    zeros = np.zeros_like(coded.scales) if coded.zeros is None else coded.zeros
    return (coded.codes.astype(np.float32) - zeros[:, coded.groups]) * coded.scales[:, coded.groups]


CASES = [
    random_codes(shape, num_groups, is_signed, has_zeros)
    for shape in SHAPES
    for num_groups in (1, 9)
    for is_signed, has_zeros in ((True, False), (False, True), (True, True))
]


@pytest.mark.parametrize("coded", CASES)
def test_widened_codes_are_fp32_products_rounded_once(coded: GroupedCodes) -> None:
    expected = values_of(coded)
    np.testing.assert_array_equal(widen_codes(coded, "float32"), expected)
    rounded = paddle.to_tensor(expected).astype("bfloat16")
    np.testing.assert_array_equal(widen_codes(coded, "bfloat16"), rounded.numpy())


@pytest.mark.parametrize("coded", CASES)
def test_converted_codes_are_the_nearest_to_the_values_with_the_smallest_scale_that_fits(coded: GroupedCodes) -> None:
    outputs, inputs = coded.codes.shape
    values = np.zeros((outputs, -(-inputs // 32) * 32), np.float32)
    values[:, :inputs] = values_of(coded)
    groups = values.reshape(outputs, -1, 32)
    wanted = np.abs(groups).max(-1) / np.float32(127)
    scales = wanted.astype(np.float16)
    scales = np.where(scales.astype(np.float32) < wanted, np.nextafter(scales, np.float16(np.inf)), scales)
    divisors = np.where(wanted > 0, scales, 1).astype(np.float32)
    codes = np.rint(groups / divisors[..., None]).reshape(outputs, -1)[:, :inputs]
    found_codes, found_scales = convert_codes(coded)
    np.testing.assert_array_equal(found_scales, scales)
    np.testing.assert_array_equal(found_codes, codes)


@pytest.mark.parametrize(
    ("groups", "size"),
    [
        (np.arange(512) // 256, 128),
        (np.arange(384) // 96, 32),
        (np.arange(576) // 64, 64),
        (np.arange(64) // 16, 0),
        (np.arange(96) // 33, 0),
        (np.zeros(576), 128),
        (np.zeros(96), 64),
        (np.zeros(33), 32),
        (np.zeros(7), 32),
        (np.repeat([4, 0, 9], 32), 32),
        (np.repeat([4, 0, 9], 64), 64),
        (np.repeat([1, 2], [128, 5]), 128),
        (np.repeat([1, 2], [120, 8]), 0),
    ],
)
def test_inputs_are_cut_into_the_largest_parts_of_one_group(groups: NDArray[Any], size: int) -> None:
    assert run_size(groups.astype(np.int32)) == size


def test_arrays_that_do_not_fit_are_refused() -> None:
    good = random_codes((3, 40), 2, True, True)
    arrays = {"codes": good.codes, "scales": good.scales, "zeros": good.zeros, "groups": good.groups}
    for name, wrong in (
        ("codes", good.codes.astype(np.int16)),
        ("codes", good.codes[:, :-1]),
        ("codes", np.asfortranarray(good.codes)),
        ("scales", good.scales.astype(np.float16)),
        ("scales", good.scales[:-1]),
        ("zeros", good.scales[:, :1]),
        ("groups", good.groups.astype(np.int64)),
        ("groups", good.groups + 1),
        ("groups", good.groups - 1),
    ):
        with pytest.raises(ValueError, match=f"grouped_codes: {name}: expected|grouped_codes: codes: expected"):
            GroupedCodes(**(arrays | {name: wrong}))
    with pytest.raises(ValueError, match="packed: expected contiguous rows of 9 codes"):
        unpack_codes(np.zeros((2, 4), np.uint8), 9, 4, True)
