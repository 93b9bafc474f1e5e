# SPDX-License-Identifier: Apache-2.0
"""Rows of GGUF tensors, split and widened, against NumPy definitions of the types and digests of the package `gguf`."""

import hashlib
from pathlib import Path
from typing import Any, Literal

import numpy as np
import paddle
import pytest
from numpy.typing import NDArray

from fastdeploy.core.ggml_types import GGML_TYPES, PLAIN_TYPES
from fastdeploy.ops import coded_piece
from fastdeploy.ops.coded_piece import CodedPiece
from fastdeploy.ops.ggml_blocks import code_bits, fidelity, find_bad_scale, has_minimum, split_rows, widen_rows
from fastdeploy.ops.linear import pack_linear
from tests.ops.ggml_definitions import HALVES, Bytes, Decoded, decode, finite_rows
from tests.ops.isa_paths import run

BLOCK_TYPES = [name for name in GGML_TYPES if name not in PLAIN_TYPES]
KEPT = [name for name in BLOCK_TYPES if fidelity(name) == "kept"]
WITH_CODES = [name for name in BLOCK_TYPES if fidelity(name) != "converted"]
CONVERTED = [name for name in BLOCK_TYPES if fidelity(name) == "converted"]
PLAIN_DTYPES = {"F32": np.float32, "F16": np.float16, "F64": np.float64}
# blake2b of what gguf 0.19 makes of finite_rows(name, 128, 16), which refer to every row of the types' grids.
DIGESTS = {
    "Q4_0": "79c20d9dc0ecc6a9",
    "Q4_1": "a5f32aec9b6b66f5",
    "Q5_0": "970e2b199e40243d",
    "Q5_1": "76a19699bae2c3f6",
    "Q8_0": "31a518d811e42d62",
    "Q2_K": "78924a44e5f7f602",
    "Q3_K": "2de5e4dad66dc2bf",
    "Q4_K": "19d82f7878070fa9",
    "Q5_K": "7497ce8a8a9b2374",
    "Q6_K": "57356d63deceac0e",
    "IQ2_XXS": "08ed215f7e28083d",
    "IQ2_XS": "a7dbc34adff36978",
    "IQ3_XXS": "ad7a28ca58e8cba8",
    "IQ1_S": "26d09ab95c36fcd5",
    "IQ4_NL": "4cca4e224f4f2bc4",
    "IQ3_S": "dd8e18ceabe21905",
    "IQ2_S": "00912f040b766134",
    "IQ4_XS": "03537a4b52755afa",
    "IQ1_M": "083f94574dfa05d3",
    "TQ1_0": "810d9882dafc2aa2",
    "TQ2_0": "6a881a185e27f9a1",
    "MXFP4": "b221212c8288b6b0",
    "NVFP4": "478b5d2fdeaba89d",
}
DIGEST_OF_PROCESS = """
import hashlib
from fastdeploy.core.ggml_types import GGML_TYPES
from fastdeploy.ops.ggml_blocks import find_bad_scale, split_rows, widen_rows
from tests.ops.ggml_definitions import HALVES, finite_rows
digest = hashlib.sha256()
for name in HALVES:
    arguments = finite_rows(name, 3000, 2), name, 2 * GGML_TYPES[name].block_values
    split = split_rows(*arguments)
    for part in (split.codes, split.scales, split.minimums, widen_rows(*arguments, "bfloat16")):
        digest.update(b"" if part is None else part)
    assert find_bad_scale(*arguments) is None
print(digest.hexdigest())
"""


def rows_of(name: str, num_rows: int = 5, num_blocks: int = 3) -> tuple[Bytes, str, int]:
    """Return random rows, their type and their number of inputs."""
    return finite_rows(name, num_rows, num_blocks), name, num_blocks * GGML_TYPES[name].block_values


def with_special_scales(name: str) -> tuple[Bytes, str, int]:
    """Return rows with blocks of scales 0, -0, the smallest, the largest subnormal one, and the largest of fp16."""
    data, name, num_inputs = rows_of(name, 11)
    blocks = data.reshape(-1, GGML_TYPES[name].block_bytes)
    halves = np.array([0.0, -0.0, 2.0**-24, 1023 * 2.0**-24, 65504, -65504, 2.0**-14], np.float16).view(np.uint8)
    for number, at in enumerate(HALVES[name]):
        for index, value in enumerate(halves.reshape(-1, 2)):
            blocks[index + number, at : at + 2] = value
    if name == "IQ1_M":  # the largest number, in the highest four bits of four words
        blocks[0, 49::2] = blocks[0, 49::2] & 15 | np.array([0xF0, 0xF0, 0xB0, 0x70])
    if name == "MXFP4":
        blocks[:7, 0] = 0, 1, 2, 103, 104, 143, 252
    if name == "NVFP4":
        blocks[0, :4] = 0, 0x7F, 0x7E, 0x01
    return data, name, num_inputs


def decoded(data: Bytes, name: str) -> Decoded:
    """Decode rows; the result has a row for each of them."""
    blocks = decode(name, data.reshape(-1, GGML_TYPES[name].block_bytes))
    minimums = None if blocks.minimums is None else blocks.minimums.reshape(len(data), -1)
    return Decoded(blocks.codes.reshape(len(data), -1), blocks.scales.reshape(len(data), -1), minimums)


def in_groups_of_32(of_groups: NDArray[np.float32], num_inputs: int) -> NDArray[np.float32]:
    """Repeat scales whose groups are larger, so that there is one for each 32 inputs."""
    return np.repeat(of_groups, num_inputs // 32 // of_groups.shape[1], axis=1)


def bfloat16_bits(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round to nearest, ties to even."""
    bits = values.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def assert_same_bytes(got: NDArray[Any], want: NDArray[Any]) -> None:
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    assert np.array_equal(got.view(np.uint8), want.view(np.uint8))


def test_there_are_types_of_each_fidelity() -> None:
    assert sorted(KEPT) == ["IQ4_NL", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ1_0", "TQ2_0"]
    assert sorted(set(WITH_CODES) - set(KEPT)) == [
        *("IQ1_S", "IQ2_XXS", "IQ3_S", "IQ3_XXS", "IQ4_XS", "MXFP4", "Q4_K", "Q5_K"),
    ]
    assert sorted(CONVERTED) == ["IQ1_M", "IQ2_S", "IQ2_XS", "NVFP4", "Q2_K", "Q3_K", "Q6_K"]


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_values_are_those_of_the_package_gguf(name: str) -> None:
    values = widen_rows(*rows_of(name, 128, 16), "float32")
    assert hashlib.blake2b(values, digest_size=8).hexdigest() == DIGESTS[name]


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_blocks_are_widened_as_defined_and_rounded_once(name: str) -> None:
    data, _, num_inputs = with_special_scales(name)
    want = decoded(data, name).values()
    assert_same_bytes(widen_rows(data, name, num_inputs, "float32"), want)
    assert_same_bytes(widen_rows(data, name, num_inputs, "bfloat16"), bfloat16_bits(want))


@pytest.mark.parametrize("name", WITH_CODES)
def test_splitting_keeps_codes_and_rounds_scales_to_fp16(name: str) -> None:
    data, _, num_inputs = with_special_scales(name)
    split, want = split_rows(data, name, num_inputs), decoded(data, name)
    assert_same_bytes(split.codes, want.codes.astype(np.int8 if want.minimums is None else np.uint8))
    with np.errstate(over="ignore"):  # such a scale becomes infinite, which packing refuses
        assert_same_bytes(split.scales, in_groups_of_32(want.scales, num_inputs).astype(np.float16))
        assert (split.minimums is None) == (want.minimums is None) == (not has_minimum(name))
        if split.minimums is not None and want.minimums is not None:
            assert_same_bytes(split.minimums, want.minimums.astype(np.float16))
    assert split.group_size == 32
    largest = 7 if code_bits(name) == 4 else 127
    assert want.codes.max() <= (largest if want.minimums is None else 2 * largest + 1)
    assert want.codes.min() >= (-largest - 1 if want.minimums is None else 0)


@pytest.mark.parametrize("name", CONVERTED)
def test_other_types_get_codes_of_eight_bits(name: str) -> None:
    data, _, num_inputs = with_special_scales(name)
    split, values = split_rows(data, name, num_inputs), decoded(data, name).values()
    groups = values.reshape(len(data), -1, 32)
    wanted = np.abs(groups).max(axis=2) / np.float32(127)
    with np.errstate(over="ignore"):
        scales = wanted.astype(np.float16)
    scales = np.where(scales < wanted, np.nextafter(scales, np.float16(np.inf)), scales)
    assert_same_bytes(split.scales, scales)
    divisors = np.where(scales == 0, 1, scales).astype(np.float32)[:, :, None]
    assert_same_bytes(split.codes, np.rint(groups / divisors).astype(np.int8).reshape(values.shape))
    assert split.minimums is None
    assert (code_bits(name), has_minimum(name)) == (8, False)
    assert np.abs(split.codes).max() == 127
    finite = np.isfinite(scales)
    kept = split.codes.reshape(groups.shape)[finite] * divisors[finite]
    assert (np.abs(kept - groups[finite]) <= scales[finite].astype(np.float32)[:, None] * 0.50001).all()


@pytest.mark.parametrize("name", WITH_CODES)
def test_split_rows_are_packed_as_pieces_of_as_many_bits(name: str) -> None:
    data, _, num_inputs = rows_of(name, 20)
    split = split_rows(data, name, num_inputs)
    tensors = [None if part is None else paddle.to_tensor(part) for part in (split.codes, split.scales, split.minimums)]
    assert tensors[0] is not None and tensors[1] is not None
    piece = CodedPiece(tensors[0], tensors[1], tensors[2], split.group_size)
    packed = pack_linear([piece], quantization="wint4" if code_bits(name) == 4 else "wint8")
    assert (packed.group_size, packed.has_minimum) == (32, has_minimum(name))
    error = np.abs(coded_piece.decode(piece).numpy() - widen_rows(data, name, num_inputs, "float32"))
    sizes = np.abs(in_groups_of_32(decoded(data, name).scales, num_inputs)) * 128
    if split.minimums is not None:
        sizes = sizes + np.abs(split.minimums.astype(np.float32))
    limit = 0 if name in KEPT else np.repeat(sizes, 32, axis=1) * 2.0**-11 + 128 * 2.0**-25
    assert (error <= limit).all()


@pytest.mark.parametrize("name", PLAIN_TYPES)
def test_plain_values_are_rounded_once_to_fp32_and_once_to_bfloat16(name: str) -> None:
    values = np.random.default_rng(0).standard_normal((5, 37)).astype(np.float32)
    values[0, :8] = 0, -0.0, 2.0**-24, 1023 * 2.0**-24, -(2.0**-14), 65504, 1.00390625, 1.01171875
    stored = values.view(np.uint32) >> 16 if name == "BF16" else values
    data = np.ascontiguousarray(stored.astype(PLAIN_DTYPES.get(name, np.uint16))).view(np.uint8)
    want = (stored << 16).view(np.float32) if name == "BF16" else stored.astype(PLAIN_DTYPES[name]).astype(np.float32)
    assert_same_bytes(widen_rows(data, name, 37, "float32"), want)
    assert_same_bytes(widen_rows(data, name, 37, "bfloat16"), bfloat16_bits(want))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_all_numbers_of_fp16_are_widened_with_their_infinities_and_nans(dtype: Literal["float32", "bfloat16"]) -> None:
    halves = np.arange(1 << 16, dtype=np.uint16)
    values = halves.view(np.float16).astype(np.float32)
    got = widen_rows(halves.view(np.uint8)[None], "F16", 1 << 16, dtype)[0]
    wide = got if dtype == "float32" else (got.astype(np.uint32) << 16).view(np.float32)
    want = values if dtype == "float32" else (bfloat16_bits(values).astype(np.uint32) << 16).view(np.float32)
    numbers = ~np.isnan(values)
    assert np.array_equal(wide[numbers].view(np.uint32), want[numbers].view(np.uint32))
    assert np.isnan(wide[~numbers]).all()


@pytest.mark.parametrize("name", ["Q4_1", "Q4_K", "Q6_K", "IQ3_S"])
def test_rows_are_taken_in_any_order_and_from_any_stride(name: str, tmp_path: Path) -> None:
    data, _, num_inputs = rows_of(name, 40)
    (tmp_path / "rows").write_bytes(b"?" + data.tobytes())  # at an odd address
    mapped = np.memmap(tmp_path / "rows", np.uint8, "r", 1, data.shape)
    rows = np.array([3, 39, 0, 3, 17])
    for stored, taken, want in (
        (mapped, rows, data[rows]),
        (mapped[5::3], None, data[5::3].copy()),
        (mapped[::-2], np.array([0, 19]), data[[39, 1]]),
        (mapped, np.array([], np.int64), data[:0]),
    ):
        expected, split = split_rows(want, name, num_inputs), split_rows(stored, name, num_inputs, taken)
        assert_same_bytes(split.codes, expected.codes)
        assert_same_bytes(split.scales, expected.scales)
        if split.minimums is not None and expected.minimums is not None:
            assert_same_bytes(split.minimums, expected.minimums)
        wide = widen_rows(stored, name, num_inputs, "float32", taken)
        assert_same_bytes(wide, widen_rows(want, name, num_inputs, "float32"))


def test_results_do_not_depend_on_the_number_of_threads() -> None:
    done = [run(["-c", DIGEST_OF_PROCESS], FD_NUM_THREADS=threads) for threads in ("1", "2", "7")]
    assert [process.returncode for process in done] == [0, 0, 0], done[0].stderr
    assert len({process.stdout for process in done}) == 1


def test_an_invalid_number_of_threads_is_an_error() -> None:
    done = run(["-c", DIGEST_OF_PROCESS], FD_NUM_THREADS="none")
    assert "HostLibraryError: FD_NUM_THREADS: expected 1..1024, got 'none'" in done.stderr


@pytest.mark.parametrize("name", BLOCK_TYPES)
@pytest.mark.parametrize("bits", [0x7C00, 0xFC00, 0x7E00, 0x7C01])
def test_the_first_row_with_an_infinite_scale_or_nan_is_found(name: str, bits: int) -> None:
    data, _, num_inputs = rows_of(name, 2000, 2)
    assert find_bad_scale(data, name, num_inputs) is None
    for at in HALVES[name]:
        broken = data.reshape(2000, 2, -1).copy()
        broken[[1999, 1234, 1777], 1, at : at + 2] = bits & 255, bits >> 8
        assert find_bad_scale(broken.reshape(data.shape), name, num_inputs) == 1234


def test_only_the_rows_that_are_taken_are_checked() -> None:
    data, name, num_inputs = rows_of("Q4_0", 20)
    data[[3, 7], 1] = 0x7C
    assert find_bad_scale(data, name, num_inputs, np.array([9, 7, 3])) == 1
    assert find_bad_scale(data, name, num_inputs, np.array([9, 8, 2])) is None


def test_scales_of_other_widths_are_checked() -> None:
    data, name, num_inputs = rows_of("IQ1_M")
    data[3, 49:56:2] = data[3, 49:56:2] & 15 | np.array([0x00, 0x00, 0xC0, 0x70])
    assert find_bad_scale(data, name, num_inputs) == 3
    data, name, num_inputs = rows_of("MXFP4")
    data[2, 17] = 252  # 12 * 2^124
    assert find_bad_scale(data, name, num_inputs) is None
    data[4, 17] = 253
    assert find_bad_scale(data, name, num_inputs) == 4


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_scales_of_all_finite_sizes_are_good(name: str) -> None:
    assert find_bad_scale(*with_special_scales(name)) is None


@pytest.mark.parametrize("name", PLAIN_TYPES)
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_the_first_row_with_a_plain_value_that_is_not_finite_is_found(name: str, value: float) -> None:
    values = np.ones((2000, 50), np.float32)
    for broken, want in (((), None), (([1999, 1500], [49, 0]), 1500)):
        if broken:
            values[broken] = value
        stored = values.view(np.uint32) >> 16 if name == "BF16" else values
        data = np.ascontiguousarray(stored.astype(PLAIN_DTYPES.get(name, np.uint16))).view(np.uint8)
        assert find_bad_scale(data, name, 50) == want


def test_a_double_that_fp32_does_not_hold_is_found() -> None:
    values = np.array([[3.4e38], [3.5e38]])
    assert find_bad_scale(values.view(np.uint8), "F64", 1) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((np.zeros((2, 18), np.uint8), "Q4_2", 32), "type_name: expected a quantized type, got 'Q4_2'"),
        ((np.zeros((2, 64), np.uint8), "F16", 32), "type_name: expected a quantized type, got 'F16'"),
        ((np.zeros((2, 18), np.uint8), "Q4_0", 33), "num_inputs: expected a multiple of 32 for Q4_0, got 33"),
        ((np.zeros((2, 18), np.uint8), "Q4_0", -32), "num_inputs: expected a multiple of 32 for Q4_0, got -32"),
        ((np.zeros((2, 18), np.uint8), "Q4_0", 64), r"data: expected uint8 \[rows, 36\].*got uint8 \[2, 18\]"),
        ((np.zeros((2, 18), np.int8), "Q4_0", 32), "data: expected uint8"),
        ((np.zeros(18, np.uint8), "Q4_0", 32), "data: expected uint8"),
        ((np.zeros((18, 2), np.uint8).T, "Q4_0", 32), r"contiguous rows.*strides \[1, 2\]"),
        ((np.zeros((2, 18), np.uint8), "Q4_0", 32, np.array([0, 2])), r"rows: expected 0..1, got 0..2"),
        ((np.zeros((2, 18), np.uint8), "Q4_0", 32, np.array([-1])), r"rows: expected 0..1, got -1..-1"),
        ((np.zeros((2, 18), np.uint8), "Q4_0", 32, np.array([0], np.int32)), "rows: expected contiguous int64"),
        ((np.zeros((2, 18), np.uint8), "Q4_0", 32, np.arange(2)[::-1]), "rows: expected contiguous int64"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        split_rows(*arguments)
    if arguments[1] != "F16":
        message = message.replace("a quantized type", "one of F32, F16, Q4_0.*")
        with pytest.raises(ValueError, match=message):
            widen_rows(*arguments[:3], "float32", *arguments[3:])
