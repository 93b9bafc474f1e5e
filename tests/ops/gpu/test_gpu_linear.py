# SPDX-License-Identifier: Apache-2.0
"""bf16 linear layers on an emulated GPU: close to float64, and a row has the same bits in every call and kernel."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import product

import numpy as np
import paddle
import pytest

from fastdeploy.ops.backends.gpu.library import Address, DeviceCounts
from fastdeploy.ops.examples import random_rows
from fastdeploy.ops.linear import PackedLinear, WeightPiece
from fastdeploy.ops.norm import NormParams
from tests.ops.bits import assert_same_bits, bits
from tests.ops.gpu.emulated import count, emulate, load

EPS = 1e-6
EDGES = (1, 8, 9, 16, 17, 31, 32, 33, 63, 64, 65, 128, 129)  # rows at which another kernel or tile begins, and beside


@dataclass(frozen=True)
class Layer:
    """A layer and its inputs; memory beyond the rows of a call holds NaN."""

    rows: int
    n: int
    k: int
    has_norm: bool = False
    has_bias: bool = False
    has_residual: bool = False
    is_gated: bool = False
    out_dtype: str = "bfloat16"
    weight: paddle.Tensor = field(init=False)
    bias: paddle.Tensor | None = field(init=False)
    x: paddle.Tensor = field(init=False)
    residual: paddle.Tensor | None = field(init=False)
    norm: NormParams | None = field(init=False)

    def __post_init__(self) -> None:
        outputs = self.n * (2 if self.is_gated else 1)
        values = {
            "weight": random_rows(outputs, self.k, "bfloat16", 1, self.k**-0.5),
            "bias": random_rows(1, outputs, "bfloat16", 2)[0] if self.has_bias else None,
            "x": random_rows(self.rows, self.k, "bfloat16", 3, 2.0),
            "residual": random_rows(self.rows, self.n, self.out_dtype, 4) if self.has_residual else None,
            "norm": NormParams(random_rows(1, self.k, "bfloat16", 5)[0], EPS) if self.has_norm else None,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def pack(self) -> PackedLinear:
        packed: PackedLinear = emulate()("pack_linear")(self.weight, self.bias, is_gated=self.is_gated)
        return packed

    def run(self, w: PackedLinear, rows: Iterable[int] | None = None, has_checks: bool = False) -> paddle.Tensor:
        """Return the outputs of one call with these rows, by default all."""
        chosen = list(range(self.rows) if rows is None else rows)
        x = paddle.concat([self.x[chosen], paddle.full([3, self.k], float("nan"), "bfloat16")])
        out = paddle.full([len(chosen) + 3, self.n], float("nan"), self.out_dtype)
        residual = None
        if self.residual is not None:
            residual = out
            out[: len(chosen)] = self.residual[chosen]
        emulate(len(chosen), has_checks)("linear")(x, w, out, len(chosen), residual, self.norm)
        assert np.isnan(out[len(chosen) :].astype("float32").numpy()).all()
        return out[: len(chosen)]

    def exact(self) -> np.ndarray:
        x = self.x.astype("float64").numpy()
        if self.norm is not None:
            x = x / np.sqrt((x * x).mean(1, keepdims=True) + EPS) * self.norm.weight.astype("float64").numpy()
            x = paddle.to_tensor(x).astype("bfloat16").astype("float64").numpy()
        total = x @ self.weight.astype("float64").numpy().T
        if self.bias is not None:
            total += self.bias.astype("float64").numpy()
        if self.is_gated:
            gate, up = total[:, : self.n], total[:, self.n :]
            total = gate / (1 + np.exp(-gate)) * up
        return total if self.residual is None else total + self.residual.astype("float64").numpy()


def assert_close(got: paddle.Tensor, want: np.ndarray) -> None:
    error = np.abs(got.astype("float64").numpy() - want) / (1 + np.abs(want))
    assert error.max() <= 8e-3


def one_by_one(layer: Layer, w: PackedLinear, rows: Iterable[int]) -> np.ndarray:
    return np.concatenate([bits(layer.run(w, [row])) for row in rows])


@pytest.mark.parametrize("options", list(product((False, True), repeat=4)), ids=lambda o: "".join("01"[i] for i in o))
@pytest.mark.parametrize("out_dtype", ["bfloat16", "float32"])
def test_gpu_linear_is_close_to_float64_with_every_combination_of_options(
    options: tuple[bool, bool, bool, bool], out_dtype: str
) -> None:
    for rows, n, k in ((3, 24, 72), (37, 21, 1096)):
        layer = Layer(rows, n, k, *options, out_dtype)
        w = layer.pack()
        out = layer.run(w, has_checks=rows < 9)
        assert_close(out, layer.exact())
        assert_same_bits(one_by_one(layer, w, (0, rows - 1)), bits(out)[[0, rows - 1]], f"{rows} rows")


@pytest.mark.parametrize("is_gated", [False, True])
def test_gpu_linear_gives_a_row_the_same_bits_for_every_number_of_rows(is_gated: bool) -> None:
    layer = Layer(129, 40, 1160, True, True, True, is_gated, "float32")
    w = layer.pack()
    want = bits(layer.run(w))
    assert_close(layer.run(w), layer.exact())
    assert_same_bits(one_by_one(layer, w, range(21)), want[:21], "rows alone")
    for rows in sorted({*range(1, 21), *EDGES}):
        assert_same_bits(bits(layer.run(w, range(rows))), want[:rows], f"{rows} rows")


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("out_dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("n", "k"), [(8208, 72), (4104, 1032)], ids=["wide tiles", "three stages"])
def test_gpu_linear_of_many_outputs_has_the_bits_of_the_other_kernels(
    n: int, k: int, is_gated: bool, out_dtype: str
) -> None:
    layer = Layer(40, n // 2 if is_gated else n, k, is_gated=is_gated, out_dtype=out_dtype)
    w = layer.pack()
    want = bits(layer.run(w))
    assert_close(layer.run(w), layer.exact())
    for rows in (1, 9, 17):
        assert_same_bits(bits(layer.run(w, range(rows))), want[:rows], f"{rows} rows")
    if is_gated:  # the gate's outputs are not the first ones of the weight
        return
    few = PackedLinear(w.data[:64].contiguous(), None, w.in_features, 64, "bfloat16")
    narrow = Layer(40, 64, k, out_dtype=out_dtype)
    narrow.x[:] = layer.x
    for rows in (1, 9, 17):
        assert_same_bits(bits(narrow.run(few, range(rows))), want[:rows, :64], f"{rows} rows of few outputs")


def test_gpu_linear_takes_pieces_in_rounds_if_there_are_more_than_warps() -> None:
    layer = Layer(33, 24, 9 * 1024 + 72, has_norm=True, out_dtype="float32")
    w = layer.pack()
    want = layer.run(w)
    assert_close(want, layer.exact())
    for rows in (1, 9, 17):
        assert_same_bits(bits(layer.run(w, range(rows), has_checks=rows == 1)), bits(want)[:rows], f"{rows} rows")


@pytest.mark.parametrize(("is_gated", "n"), [(False, 4090), (True, 2045)])
@pytest.mark.parametrize("out_dtype", ["bfloat16", "float32"])
def test_gpu_linear_of_504_rows(is_gated: bool, n: int, out_dtype: str) -> None:
    layer = Layer(504, n, 72, has_bias=True, has_residual=True, is_gated=is_gated, out_dtype=out_dtype)
    w = layer.pack()
    out = layer.run(w)
    assert_close(out, layer.exact())
    rows = (0, 127, 128, 503)
    assert_same_bits(one_by_one(layer, w, rows), bits(out)[list(rows)], "rows alone")


@pytest.mark.parametrize("rows", [1, 8, 16])
@pytest.mark.parametrize(("k", "is_gated"), [(1024, False), (2112, True)])
def test_gpu_linear_reads_each_byte_of_the_weight_once(rows: int, k: int, is_gated: bool) -> None:
    layer = Layer(rows, 64, k, is_gated=is_gated)
    w = layer.pack()
    counted = count(lambda: layer.run(w, has_checks=True))
    num_tiles = w.data.shape[0] // 16
    assert counted["launches"] == 1
    assert counted["blocks"] == num_tiles
    assert counted["mma"] == num_tiles * (w.data.shape[1] // 16) * -(-rows // 8)
    assert counted["global_read_bytes"] == w.num_bytes + num_tiles * rows * k * 2, "each block reads x once"
    assert counted["global_written_bytes"] == rows * 64 * 2
    touched = (counted["read_sectors"] + counted["written_sectors"]) * 32
    assert (counted["global_read_bytes"] + counted["global_written_bytes"]) / touched >= 0.90
    assert counted["matrix_wavefronts"] <= 1.10 * counted["least_matrix_wavefronts"]


@pytest.mark.parametrize("rows", [40, 200])
def test_gpu_linear_of_many_rows_uses_whole_sectors_and_all_banks(rows: int) -> None:
    layer = Layer(rows, 128, 256, has_residual=True)
    counted = count(lambda: layer.run(layer.pack(), has_checks=True))
    touched = (counted["read_sectors"] + counted["written_sectors"]) * 32
    assert (counted["global_read_bytes"] + counted["global_written_bytes"]) / touched >= 0.90
    assert counted["matrix_wavefronts"] <= 1.10 * counted["least_matrix_wavefronts"]


@pytest.mark.parametrize("capacity", [20, 40])
def test_gpu_linear_reads_the_number_of_rows_on_the_device(capacity: int) -> None:
    layer = Layer(capacity, 40, 72, has_norm=True)
    w = layer.pack()
    counts = paddle.to_tensor([7, 1], dtype="int32")
    out = paddle.full([capacity, 40], float("nan"), "bfloat16")
    linear = emulate()("linear")
    with load(True).counted_by(DeviceCounts(Address(counts.data_ptr()), Address(counts.data_ptr() + 4))):
        linear(layer.x, w, out, capacity, None, layer.norm)
    assert np.isnan(out[7:].astype("float32").numpy()).all()
    assert_same_bits(bits(out)[:7], bits(layer.run(w, range(7))), "7 rows")


def test_gpu_linear_packs_transposed_pieces() -> None:
    layer = Layer(5, 36, 88, is_gated=True)
    w = layer.pack()
    stored = [layer.weight[:50].t().contiguous(), layer.weight[30:].t().contiguous()]
    pieces = [WeightPiece(stored[0], 0, 40, True), WeightPiece(stored[1], 10, 42, True)]
    packed = emulate()("pack_linear")(pieces, is_gated=True)
    assert_same_bits(bits(packed.data), bits(w.data), "packed")


def test_gpu_linear_of_the_first_outputs_shares_the_weight() -> None:
    layer = Layer(5, 200, 72)
    w = layer.pack()
    first = emulate()("first_outputs")(w, 128)
    assert first.data.data_ptr() == w.data.data_ptr()
    assert first.num_bytes == 128 * 128 * 2
    narrow = Layer(5, 128, 72)
    assert_same_bits(bits(narrow.run(first)), bits(layer.run(w))[:, :128], "outputs")


def test_gpu_linear_refuses_what_it_has_no_kernel_for() -> None:
    pack, linear = emulate()("pack_linear"), emulate()("linear")
    with pytest.raises(ValueError, match="pack_linear: weight: expected bfloat16, got float32"):
        pack(random_rows(8, 64, "float32", 1))
    with pytest.raises(ValueError, match="pack_linear: weight: expected a multiple of 8 inputs, got 60"):
        pack(random_rows(8, 60, "bfloat16", 1))
    layer = Layer(2, 8, 64)
    w = layer.pack()
    with pytest.raises(ValueError, match="linear: out: expected bfloat16 or float32, got int32"):
        linear(layer.x, w, paddle.zeros([2, 8], "int32"), 2)
    with pytest.raises(ValueError, match="linear: residual: expected bfloat16, got float32"):
        linear(layer.x, w, paddle.zeros([2, 8], "bfloat16"), 2, paddle.zeros([2, 8]))
    with pytest.raises(ValueError, match=r"linear: x: expected \[3 or more, 64\], got \[2, 64\]"):
        linear(layer.x, w, paddle.zeros([3, 8], "bfloat16"), 3)
