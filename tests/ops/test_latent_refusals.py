# SPDX-License-Identifier: Apache-2.0
"""Invalid arguments of latent attention are refused with operator, argument, expected and actual value."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import paddle
import pytest

from fastdeploy.ops.attention import make_attention_metadata
from fastdeploy.ops.latent_attention import LatentCache, LatentLayout, allocate_latent_cache, append_latent_attention
from fastdeploy.ops.norm import NormParams

TINY = LatentLayout(3, 24, 16, 8)


def attend(
    layout: LatentLayout = TINY,
    dtype: str = "float32",
    kv_len: int = 2,
    table: int = 0,
    slot: int | None = None,
    num_masked_prefix: int = 0,
    **changed: paddle.Tensor,
) -> None:
    cache = changed.pop("cache", paddle.zeros([2, 16, TINY.latent_dim + TINY.rope_dim], dtype))
    batch = make_attention_metadata([2], [kv_len], np.array([[table]]), 16)
    if slot is not None:
        batch = replace(batch, slot_mapping=paddle.to_tensor(np.array([0, slot], np.int32)))
    tensors = {
        "absorbed": paddle.zeros([2, 72], dtype),
        "query": paddle.zeros([2, 72], dtype),
        "latent": paddle.zeros([2, 32], dtype),
        "out": paddle.zeros([2, 72], dtype),
        "norm": paddle.ones([24], dtype),
        "cos_sin": paddle.zeros([5, 8]),
    }
    absorbed, query, latent, out, norm, cos_sin = (tensors | changed).values()
    append_latent_attention(
        absorbed,
        query,
        latent,
        LatentCache(cache, 16),
        batch,
        out,
        layout,
        0.25,
        NormParams(norm, 1e-6),
        cos_sin,
        True,
        num_masked_prefix,
    )


def floats(*shape: int, dtype: str = "float32") -> paddle.Tensor:
    return paddle.zeros(list(shape), dtype)


REFUSED: list[tuple[str, Callable[[], object]]] = [
    ("latent_dim: expected a multiple of 8 from 8 to 1024, got 20", lambda: attend(LatentLayout(3, 20, 16, 8))),
    ("latent_dim: expected a multiple of 8 from 8 to 1024, got 1032", lambda: attend(LatentLayout(3, 1032, 16, 8))),
    ("nope_dim: expected a multiple of 8 from 0 to 256, got 12", lambda: attend(LatentLayout(3, 24, 12, 8))),
    ("rope_dim: expected a multiple of 8 from 8 to 256, got 0", lambda: attend(LatentLayout(3, 24, 16, 0))),
    ("rope_dim: expected a multiple of 8 from 8 to 256, got 264", lambda: attend(LatentLayout(3, 24, 16, 264))),
    ("num_heads: expected at least 1, got 0", lambda: attend(LatentLayout(0, 24, 16, 8))),
    ("cache: expected a CPU tensor of [any, any, 32], got [2, 16, 33]", lambda: attend(cache=floats(2, 16, 33))),
    ("cache: expected dtype bfloat16 or float32, got int8", lambda: attend(cache=floats(2, 16, 32, dtype="int8"))),
    ("block_size: expected a multiple of 16, got 24", lambda: attend(cache=floats(2, 24, 32))),
    ("absorbed: expected a CPU tensor that holds [2, 72], got [2, 71]", lambda: attend(absorbed=floats(2, 71))),
    ("absorbed: expected dtype float32, got bfloat16", lambda: attend(absorbed=floats(2, 72, dtype="bfloat16"))),
    ("query: expected at least 72 columns, got 71", lambda: attend(query=floats(2, 71))),
    ("query: expected a CPU tensor that holds [2, any], got [1, 72]", lambda: attend(query=floats(1, 72))),
    ("latent: expected at least 32 columns, got 31", lambda: attend(latent=floats(2, 31))),
    ("latent: expected dtype float32, got bfloat16", lambda: attend(latent=floats(2, 32, dtype="bfloat16"))),
    ("out: expected a CPU tensor that holds [2, 72], got [2, 70]", lambda: attend(out=floats(2, 70))),
    ("norm: expected a CPU tensor of [24], got [32]", lambda: attend(norm=floats(32))),
    ("cos_sin: expected a CPU tensor of [any, 8], got [5, 6]", lambda: attend(cos_sin=floats(5, 6))),
    ("positions: expected 0..4, got 5", lambda: attend(kv_len=6)),
    ("slot_mapping: expected a slot of the cache, got 32", lambda: attend(slot=32)),
    ("slot_mapping: expected a slot of the cache, got -1", lambda: attend(slot=-1)),
    ("block_tables: expected a block of the cache, got 2", lambda: attend(table=2, slot=1)),
    ("num_masked_prefix: expected 0 to 16, got 17", lambda: attend(num_masked_prefix=17)),
]
REFUSED_ALLOCATIONS: list[tuple[str, tuple[int, int, int, int, str]]] = [
    ("block_size: expected a multiple of 16, got 24", (1, 24, 24, 8, "float32")),
    ("latent_dim: expected a multiple of 8 from 8 to 1024, got 1032", (1, 16, 1032, 8, "float32")),
    ("rope_dim: expected a multiple of 8 from 8 to 256, got 4", (1, 16, 24, 4, "float32")),
    ("dtype: expected bfloat16 or float32, got int8", (1, 16, 24, 8, "int8")),
]


@pytest.mark.parametrize(("message", "call"), REFUSED, ids=[message[:60] for message, _ in REFUSED])
def test_invalid_arguments_are_refused_with_one_sentence(message: str, call: Callable[[], object]) -> None:
    attend()
    with pytest.raises(ValueError, match=re.escape(f"append_latent_attention: {message}")):
        call()


@pytest.mark.parametrize(("message", "arguments"), REFUSED_ALLOCATIONS)
def test_an_invalid_cache_is_refused_with_one_sentence(message: str, arguments: tuple[int, int, int, int, str]) -> None:
    with pytest.raises(ValueError, match=re.escape(f"allocate_latent_cache: {message}")):
        allocate_latent_cache(*arguments)
