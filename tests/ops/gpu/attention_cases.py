# SPDX-License-Identifier: Apache-2.0
"""Sequences of random rows, of which attention on an emulated GPU computes the last ones; float64 to compare with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import paddle

from fastdeploy.ops.attention import AttentionMetadata, KVCache, make_attention_metadata
from fastdeploy.ops.examples import random_rows
from fastdeploy.ops.rotary import HeadLayout
from tests.ops.bits import assert_same_bits, bits
from tests.ops.gpu.emulated import emulate

TOLERANCE = 1.6e-2

Rows = tuple[int, int, int]  # sequence, first position, end


@dataclass(frozen=True)
class Sequences:
    """Sequences of some lengths; number b has the first shared[b] blocks of number 0.

    Attributes:
        tables: [num_seqs, max_blocks].
        qkv: [length, row_size] of each sequence.
    """

    heads: HeadLayout
    lengths: Sequence[int]
    block_size: int = 16
    shared: Sequence[int] = ()
    cache_dtype: str = "bfloat16"
    seed: int = 1
    tables: np.ndarray = field(init=False)
    qkv: list[paddle.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        shared = self.shared or [0] * len(self.lengths)
        most = -(-max(self.lengths) // self.block_size)
        tables = np.random.default_rng(self.seed).permutation(len(self.lengths) * most).reshape(-1, most)
        qkv = []
        for b, length in enumerate(self.lengths):
            tables[b, : shared[b]] = tables[0, : shared[b]]
            qkv.append(random_rows(length, self.heads.row_size, "bfloat16", self.seed + b))
            positions, first_kv = shared[b] * self.block_size, self.heads.num_heads * self.heads.head_dim
            if positions:
                qkv[b][:positions, first_kv:] = qkv[0][:positions, first_kv:]
        object.__setattr__(self, "tables", tables)
        object.__setattr__(self, "qkv", qkv)

    def parts(self, b: int) -> tuple[paddle.Tensor, paddle.Tensor, paddle.Tensor]:
        """Return queries, keys and values [length, heads, head_dim]."""
        kv, rows = self.heads.num_kv_heads, self.qkv[b].reshape([self.lengths[b], -1, self.heads.head_dim])
        return rows[:, : -2 * kv], rows[:, -2 * kv : -kv], rows[:, -kv:]

    def cache(self, rows: Sequence[Rows]) -> KVCache:
        """Return a cache with the positions before the rows, and NaN elsewhere; in int8, scales that are NaN."""
        size, kv_heads, dim = self.block_size, self.heads.num_kv_heads, self.heads.head_dim
        cache: KVCache = emulate()("allocate_kv_cache")(self.tables.size, size, kv_heads, dim, self.cache_dtype)
        for tensor, part in ((cache.key, 1), (cache.value, 2)):
            memory = np.full(tensor.shape, -1, np.int8 if cache.is_int8 else np.int16)
            stored = memory[..., : size * dim].reshape(-1, kv_heads, size, dim) if cache.is_int8 else memory
            scales = memory[..., size * dim :].view(np.float32) if cache.is_int8 else None
            for b, begin, _ in rows:
                if begin == 0:
                    continue
                positions, values = np.arange(begin), self.parts(b)[part][:begin].contiguous()
                place = self.tables[b, positions // size], slice(None), positions % size
                if scales is not None:
                    stored[place], scales[place] = quantize(values)
                else:
                    stored[place] = bits(values)
            tensor[:] = paddle.to_tensor(memory) if cache.is_int8 else paddle.to_tensor(memory).view("bfloat16")
        return cache

    def metadata(self, rows: Sequence[Rows]) -> AttentionMetadata:
        """Describe a call with these rows."""
        num_new, ends = [end - begin for _, begin, end in rows], [end for _, _, end in rows]
        return make_attention_metadata(num_new, ends, self.tables[[b for b, _, _ in rows]], self.block_size)

    def run(
        self, rows: Sequence[Rows], has_checks: bool = False, seed: int = 0, num_masked_prefix: int = 0
    ) -> paddle.Tensor:
        """Return the results of one call with these rows; memory beyond them holds NaN, before and after."""
        batch, cache = self.metadata(rows), self.cache(rows)
        unused = paddle.full([3, self.heads.row_size], float("nan"), "bfloat16")
        qkv = paddle.concat([self.qkv[b][begin:end] for b, begin, end in rows] + [unused])
        out = paddle.full([batch.num_rows + 3, self.heads.num_heads * self.heads.head_dim], float("nan"), "bfloat16")
        append = emulate(seed, has_checks)("append_attention")
        append(qkv, cache, batch, out, self.heads, self.heads.head_dim**-0.5, num_masked_prefix)
        assert np.isnan(out[batch.num_rows :].astype("float32").numpy()).all()
        return out[: batch.num_rows]

    def alone(self, rows: Sequence[Rows], num_masked_prefix: int = 0) -> np.ndarray:
        """Return the bits of the rows, each computed in a call of its own."""
        single = [(b, t, t + 1) for b, begin, end in rows for t in range(begin, end)]
        return np.concatenate([bits(self.run([row], num_masked_prefix=num_masked_prefix)) for row in single])

    def exact(self, rows: Sequence[Rows], num_masked_prefix: int = 0) -> np.ndarray:
        """Return the results in float64."""
        outs = []
        for b, begin, end in rows:
            query, key, value = (part.astype("float64").numpy() for part in self.parts(b))
            if self.cache_dtype == "int8":
                key, value = (
                    codes * scales[..., None].astype(np.float64) for codes, scales in map(quantize, (key, value))
                )
            group = self.heads.num_heads // self.heads.num_kv_heads
            key, value = (np.repeat(part, group, axis=1) for part in (key, value))
            scores = np.einsum("rhd,phd->rhp", query[begin:end], key[:end]) * self.heads.head_dim**-0.5
            row, position = np.arange(begin, end)[:, None], np.arange(end)[None]
            hidden = (position > row) | ((position < num_masked_prefix) & (position != row))
            scores = np.where(hidden[:, None], -np.inf, scores)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            outs.append(np.einsum("rhp,phd->rhd", weights, value[:end]).reshape(end - begin, -1))
        return np.concatenate(outs)

    def check(self, rows: Sequence[Rows], what: str, has_checks: bool = False, num_masked_prefix: int = 0) -> None:
        """Check a call against float64, and against calls with one row."""
        got = self.run(rows, has_checks, 0, num_masked_prefix)
        assert_close(got, self.exact(rows, num_masked_prefix))
        assert_same_bits(bits(got), self.alone(rows, num_masked_prefix), what)


def quantize(rows: paddle.Tensor | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return codes and scales, as common/quant.h defines them, of the last axis."""
    wide = np.asarray(rows if isinstance(rows, np.ndarray) else rows.astype("float32").numpy(), np.float32)
    absmax = np.abs(wide).max(-1)
    codes = np.rint(wide * (np.float32(127) / np.maximum(absmax, np.float32(1e-30)))[..., None]).astype(np.int8)
    return codes, absmax / np.float32(127)


def round_to_codes(rows: np.ndarray) -> np.ndarray:
    """Return what an int8 cache holds of rows."""
    codes, scales = quantize(rows)
    return np.asarray(codes * scales[..., None].astype(np.float64))


def assert_close(got: paddle.Tensor, want: np.ndarray, tolerance: float = TOLERANCE) -> None:
    """Check that results are within the tolerance of exact ones."""
    error = np.abs(got.astype("float64").numpy() - want) / (1 + np.abs(want))
    assert error.max() <= tolerance
