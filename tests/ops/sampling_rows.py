# SPDX-License-Identifier: Apache-2.0
"""Rows of logits and parameters for the tests of sampling."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import paddle
from numpy.typing import NDArray

from fastdeploy.ops.buffer import HostBuffer
from fastdeploy.ops.sampling import FloatColumn, IntColumn, SamplingBatch


@dataclass
class RowOptions:
    """The sampling options of one row; by default, all of them are off."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    prompt: list[int] = field(default_factory=list)
    output: list[int] = field(default_factory=list)
    bias: dict[int, float] = field(default_factory=dict)
    banned: list[int] = field(default_factory=list)
    seed: int = 0
    position: int = 0
    draft_id: int = -1
    vocab_limit: int = 2**31 - 1
    mask: list[int] | None = None  # words


def batch_of(row_options: list[RowOptions]) -> SamplingBatch:
    """Return a batch with one row for each element."""
    batch = SamplingBatch(max(len(row_options), 1))
    for row, options in enumerate(row_options):
        batch.float_params.array[row] = [
            *(
                options.temperature,
                options.top_p,
                options.min_p,
                options.repetition,
                options.presence,
                options.frequency,
            )
        ]
        history = batch.append_history(options.prompt + options.output)
        bias = batch.append_bias(list(options.bias), list(options.bias.values()))
        banned = batch.append_banned(options.banned)
        mask = -1 if options.mask is None else batch.append_mask(np.array(options.mask, np.int32))
        output = history + len(options.prompt)
        batch.int_params.array[row] = [
            *(np.uint64(options.seed).astype(np.int64), options.position, options.top_k),
            *(history, output, output + len(options.output), bias, bias + len(options.bias)),
            *(banned, banned + len(options.banned), options.draft_id, options.vocab_limit, mask),
        ]
    assert batch.float_params.array.shape[1] == len(FloatColumn)
    assert batch.int_params.array.shape[1] == len(IntColumn)
    return batch


def logits_of(values: NDArray | list) -> HostBuffer:
    """Return a float32 buffer [rows, V] with these values."""
    array = np.atleast_2d(np.asarray(values, np.float32))
    buffer = HostBuffer(array.shape, "float32")
    buffer.array[:] = array
    return buffer


def random_options(rng: np.random.Generator, vocab_size: int) -> RowOptions:
    """Return options each of which is on in about half of the cases."""

    def maybe(off: float, low: float, high: float) -> float:
        return float(np.float32(rng.uniform(low, high))) if rng.random() < 0.5 else off

    def ids(most: int) -> list[int]:
        return rng.integers(-2, vocab_size + 2, rng.integers(0, most)).tolist() if rng.random() < 0.5 else []

    return RowOptions(
        temperature=0.0 if rng.random() < 0.1 else maybe(1.0, 0.1, 2.0),
        top_k=int(rng.integers(1, vocab_size + 3)) if rng.random() < 0.5 else int(rng.integers(-1, 1)),
        top_p=maybe(1.0, 0.0, 1.0),
        min_p=maybe(0.0, 0.0, 0.3),
        repetition=maybe(1.0, 0.5, 2.0),
        presence=maybe(0.0, -2, 2),
        frequency=maybe(0.0, -2, 2),
        prompt=ids(30),
        output=ids(30),
        bias={token_id: float(rng.uniform(-5, 5)) for token_id in ids(6)},
        banned=ids(6),
        seed=int(rng.integers(0, 2**64, dtype=np.uint64)),
        position=int(rng.integers(0, 2**20)),
        draft_id=int(rng.integers(-1, vocab_size)),
        vocab_limit=int(rng.integers(vocab_size // 2 + 1, vocab_size + 10)),
        mask=rng.integers(-(2**31), 2**31, (vocab_size + 31) // 32).tolist() if rng.random() < 0.3 else None,
    )


def random_logits(rng: np.random.Generator, rows: int, vocab_size: int) -> NDArray[np.float32]:
    """Return rows of different spread; every third has many equal logits."""
    values = rng.standard_normal((rows, vocab_size)) * rng.uniform(0.2, 6, (rows, 1))
    values[::3] = np.round(values[::3])
    return values.astype(np.float32)


def mask_of(ids: Iterable[int], vocab_size: int) -> list[int]:
    """Return the words of a mask that allows these ids."""
    words = np.zeros((vocab_size + 31) // 32, np.uint32)
    for token_id in ids:
        words[token_id // 32] |= np.uint32(1 << token_id % 32)
    return words.view(np.int32).tolist()


def results_of(batch: SamplingBatch, rows: int) -> tuple[list[int], list[int], list[int]]:
    """Return (token ids, statuses, whether drafts are allowed)."""
    fields = (batch.token_ids, batch.status, batch.draft_is_allowed)
    tokens, statuses, allowed = (buffer.array[:rows].tolist() for buffer in fields)
    return tokens, statuses, allowed


def tensor(values: list[int]) -> paddle.Tensor:
    """Return an int32 CPU tensor."""
    return paddle.to_tensor(np.array(values, np.int32), place=paddle.CPUPlace())
