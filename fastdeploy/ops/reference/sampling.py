# SPDX-License-Identifier: Apache-2.0
"""Sampling in plain NumPy, step by step, in float64 where the native kernels use integers.

Tests compare kernels with it, and it replaces the kernel on backends that have none; it runs on the host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from paddle import Tensor

if TYPE_CHECKING:
    from fastdeploy.ops.sampling import LogprobBuffers, SamplingBatch

GREEDY_TEMPERATURE = np.float32(1e-5)
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF

Floats = NDArray[np.float32]
DRAFT_ID, SKIPPED = 10, 3  # of IntColumn and RowStatus, which cannot be imported here: their module imports this one


def philox4x32(counters: NDArray[np.uint32], key: int) -> NDArray[np.uint32]:
    """Return the words [n, 4] of counters [n, 4] (Salmon et al., SC 2011)."""
    c = [counters[:, i].astype(np.uint64) for i in range(4)]
    key0, key1 = key & _WORD, (key >> 32) & _WORD
    for _ in range(10):
        product0, product1 = c[0] * np.uint64(_MULTIPLIERS[0]), c[2] * np.uint64(_MULTIPLIERS[1])
        c = [
            (product1 >> np.uint64(32)) ^ c[1] ^ np.uint64(key0),
            product1 & np.uint64(_WORD),
            (product0 >> np.uint64(32)) ^ c[3] ^ np.uint64(key1),
            product0 & np.uint64(_WORD),
        ]
        key0, key1 = (key0 + _KEY_STEPS[0]) & _WORD, (key1 + _KEY_STEPS[1]) & _WORD
    return np.stack(c, axis=1).astype(np.uint32)


def gumbel_of_words(words: NDArray[np.uint32]) -> Floats:
    """Return -log(-log1p(-w)) for w = (word + 1/2) / 2**32."""
    w = (words.astype(np.float64) + 0.5) * 2.0**-32
    return (-np.log(-np.log1p(-w))).astype(np.float32)


def gumbel_noise(seed: int, position: int, vocab_size: int) -> Floats:
    """Return the noise of every id: word v & 3 of counter (v >> 2, 0, position low, position high)."""
    counters = np.zeros(((vocab_size + 3) // 4, 4), np.uint32)
    counters[:, 0] = np.arange(len(counters))
    counters[:, 2], counters[:, 3] = position & _WORD, position >> 32
    return gumbel_of_words(philox4x32(counters, seed).reshape(-1)[:vocab_size])


def sample(
    logits: Tensor,
    batch: SamplingBatch,
    num_rows: int,
    keep_processed: bool = False,
    stop_at_rejections: bool = False,
) -> None:
    """As `fastdeploy.ops.sampling.sample`."""
    values = logits[:num_rows].numpy()
    drafts = batch.int_params.array[:, DRAFT_ID]
    rejected = False
    for row in range(num_rows):
        follows = stop_at_rejections and row > 0 and drafts[row - 1] >= 0
        rejected = follows and (rejected or batch.token_ids.array[row - 1] != drafts[row - 1])
        if rejected:
            batch.token_ids.array[row], batch.status.array[row] = -1, SKIPPED
            batch.draft_is_allowed.array[row] = False
            continue
        processed, token_id, status, draft_is_allowed = _sample_row(values[row], batch, row)
        batch.token_ids.array[row] = token_id
        batch.status.array[row] = status
        batch.draft_is_allowed.array[row] = draft_is_allowed
        values[row] = processed
    if keep_processed:
        logits[:num_rows] = values


def _sample_row(raw: Floats, batch: SamplingBatch, row: int) -> tuple[Floats, int, int, bool]:
    """Return (processed logits, token id, status, whether the draft is allowed)."""
    temperature, top_p, min_p, *penalties = batch.float_params.array[row]
    seed, position, top_k, *ranges, draft_id, vocab_limit, mask_begin = batch.int_params.array[row].tolist()
    x = raw.copy()
    _bias(x, batch, *ranges[3:5])
    _penalise(x, batch.history.array, penalties, *ranges[:3])
    _ban(x, batch.banned_ids.array[ranges[5] : ranges[6]])
    num_ids = min(max(vocab_limit, 0), len(x))
    x[num_ids:] = -np.inf
    if mask_begin >= 0:
        _mask(x[:num_ids], batch.mask_words.array[mask_begin:])
    if np.isnan(x).any() or x.max() == np.inf:
        return x, -1, 1, False
    if x.max() == -np.inf:
        return x, -1, 2, False
    if temperature < GREEDY_TEMPERATURE:
        token_id = int(np.argmax(x))
        return x, token_id, 0, draft_id == token_id
    x = filtered(x / temperature, top_k, top_p, min_p)
    token_id = int(np.argmax(x + gumbel_noise(seed % 2**64, position, len(x))))
    return x, token_id, 0, 0 <= draft_id < len(x) and x[draft_id] > -np.inf


def _in_vocabulary(ids: NDArray, vocab_size: int) -> NDArray:
    return (ids >= 0) & (ids < vocab_size)


def _bias(x: Floats, batch: SamplingBatch, begin: int, end: int) -> None:
    ids = batch.bias_ids.array[begin:end]
    valid = _in_vocabulary(ids, len(x))
    np.add.at(x, ids[valid], batch.bias_values.array[begin:end][valid])


def _penalise(
    x: Floats, history: NDArray, penalties: list[np.float32], begin: int, output_begin: int, end: int
) -> None:
    repetition, presence, frequency = penalties
    if repetition == 1 and presence == 0 and frequency == 0:
        return
    seen = history[begin:end]
    seen = np.unique(seen[_in_vocabulary(seen, len(x))])
    x[seen] = np.where(x[seen] > 0, x[seen] / repetition, x[seen] * repetition)
    output = history[max(output_begin, begin) : end]
    ids, counts = np.unique(output[_in_vocabulary(output, len(x))], return_counts=True)
    x[ids] = x[ids] - presence - frequency * counts.astype(np.float32)


def _ban(x: Floats, banned: NDArray) -> None:
    x[banned[_in_vocabulary(banned, len(x))]] = -np.inf


def _mask(x: Floats, words: NDArray) -> None:
    ids = np.arange(len(x))
    x[(words[ids // 32] >> (ids % 32)) & 1 == 0] = -np.inf


def filtered(x: Floats, top_k: int, top_p: float, min_p: float) -> Floats:
    """Apply top_k, top_p and min_p, in this order, to scaled logits [V]; removed ids become -inf."""
    order = np.lexsort((np.arange(len(x)), -x))  # logit descending, id ascending
    order = order[x[order] > -np.inf]
    if top_k > 0:
        order = order[:top_k]
    if top_p < 1:
        probability = np.exp(x[order].astype(np.float64) - float(x[order[0]]))
        share = np.cumsum(probability) / probability.sum()
        order = order[: 1 + int(np.argmax(share.astype(np.float32) >= np.float32(top_p)))]
    if min_p > 0:
        order = order[x[order] >= x[order[0]] + np.log(np.float32(min_p))]
    remaining = np.full_like(x, -np.inf)
    remaining[order] = x[order]
    return remaining


def logprobs(logits: Tensor, rows: Tensor, chosen: Tensor, num_rows: int, top_n: int, out: LogprobBuffers) -> None:
    """As `fastdeploy.ops.sampling.logprobs`."""
    for i, (row, token_id) in enumerate(zip(rows.tolist()[:num_rows], chosen.tolist()[:num_rows], strict=True)):
        x = logits[row].numpy()
        shifted = x.astype(np.float64) - float(x.max())
        values = shifted - np.log(np.exp(shifted).sum())
        order = np.lexsort((np.arange(len(x)), -x))
        out.chosen_logprob.array[i] = values[token_id]
        out.chosen_rank.array[i] = 1 + int(np.argmax(order == token_id))
        count = min(top_n, len(x))
        out.top_ids.array[i, :top_n] = -1
        out.top_logprobs.array[i, :top_n] = np.nan
        out.top_ids.array[i, :count] = order[:count]
        out.top_logprobs.array[i, :count] = values[order[:count]]
