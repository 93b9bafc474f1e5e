# SPDX-License-Identifier: Apache-2.0
"""Sampling with block maxima that a captured layer has written equals sampling from all logits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import paddle
import pytest
from numpy.typing import NDArray

from fastdeploy.ops.backends.cpu.graph import OpGraph
from fastdeploy.ops.embedding import embedding
from fastdeploy.ops.examples import random_rows
from fastdeploy.ops.linear import linear, pack_linear
from fastdeploy.ops.quantized_form import FORMS, NO_QUANTIZATION
from fastdeploy.ops.sampling import RowStatus, SamplingBatch, sample
from tests.ops.sampling_rows import RowOptions, batch_of, logits_of, random_logits, random_options, results_of

INF, NAN = float("inf"), float("nan")
Results = tuple[list[int], list[int], list[int]]


class Layer:
    """A captured layer whose outputs are the given logits, followed by sampling."""

    def __init__(
        self, values: NDArray | list, row_options: Sequence[RowOptions], keep: bool = False, stop: bool = False
    ) -> None:
        self.values, self.batch = logits_of(values), batch_of(list(row_options))
        rows, vocab_size = self.values.array.shape
        self.out = paddle.zeros([rows, vocab_size])
        self.x, self.weight = paddle.zeros([rows, 2]), pack_linear(paddle.zeros([vocab_size, 2]))

        def compute() -> None:
            linear(self.x, self.weight, self.out, rows, self.values.tensor)
            sample(self.out, self.batch, rows, keep, stop)

        self.graph = OpGraph(compute)

    def results(self, rows: int) -> Results:
        """Return the results of the first rows."""
        self.graph.replay(rows, 0)
        return results_of(self.batch, rows)


def sampled_from_all(values: NDArray | list, row_options: Sequence[RowOptions], stop: bool = False) -> Results:
    logits, batch = logits_of(values), batch_of(list(row_options))
    sample(logits.tensor, batch, len(row_options), stop_at_rejections=stop)
    return results_of(batch, len(row_options))


@pytest.mark.parametrize("vocab_size", [1, 63, 64, 65, 150, 1000, 5003])
def test_random_rows_are_sampled_as_from_all_logits(vocab_size: int) -> None:
    rng = np.random.default_rng(vocab_size)
    row_options = [random_options(rng, vocab_size) for _ in range(60)]
    for options in row_options[::2]:  # only filters and noise, or greedy
        options.bias, options.banned, options.mask = {}, [], None
        options.repetition, options.presence, options.frequency = 1.0, 0.0, 0.0
    for options in row_options[::4]:
        options.temperature = 0.0
    values = random_logits(rng, 60, vocab_size)
    layer = Layer(values, row_options)
    assert layer.graph.describe() == [f"Linear with block maxima [{vocab_size}, 2]", "Sample"]
    assert layer.results(60) == sampled_from_all(values, row_options)
    np.testing.assert_array_equal(layer.out.numpy(), values)
    assert layer.results(7) == sampled_from_all(values[:7], row_options[:7])
    kept, buffer, batch = Layer(values, row_options, keep=True), logits_of(values), batch_of(row_options)
    sample(buffer.tensor, batch, 60, keep_processed=True)
    assert kept.results(60) == results_of(batch, 60)
    np.testing.assert_array_equal(kept.out.numpy(), buffer.array)


def row(vocab_size: int, **logits: float) -> list[float]:
    """Return logits that are 0 except those of ids 1, 2, ..., given as i1=..., i2=..."""
    values = [0.0] * vocab_size
    for name, value in logits.items():
        values[int(name[1:])] = value
    return values


@pytest.mark.parametrize(
    ("logits", "limit", "token", "status"),
    [
        (row(300, i70=2.0, i299=2.0), 300, 70, RowStatus.OK),
        (row(300, i130=2.0, i129=2.0), 300, 129, RowStatus.OK),
        (row(300, i299=2.0), 300, 299, RowStatus.OK),
        (row(300, i130=2.0, i200=3.0), 200, 130, RowStatus.OK),  # the limit is inside a block
        (row(300, i130=2.0, i192=3.0), 192, 130, RowStatus.OK),  # the limit is between two blocks
        (row(300, i299=NAN), 299, 0, RowStatus.OK),
        (row(300, i193=NAN, i190=1.0), 193, 190, RowStatus.OK),
        (row(300, i299=NAN, i3=1.0), 300, -1, RowStatus.NAN),
        (row(300, i191=NAN, i190=INF), 299, -1, RowStatus.NAN),
        (row(300, i64=INF), 300, -1, RowStatus.NAN),
        ([-INF] * 300, 300, -1, RowStatus.EMPTY),
        ([-INF] * 299 + [1.0], 299, -1, RowStatus.EMPTY),
        ([-INF] * 299 + [-1e30], 300, 299, RowStatus.OK),
        ([-0.0] * 64 + [0.0] * 236, 300, 0, RowStatus.OK),
        (row(300, i5=1.0), 0, -1, RowStatus.EMPTY),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1e-4])
def test_the_first_of_the_largest_logits_is_found(
    logits: list[float], limit: int, token: int, status: RowStatus, temperature: float
) -> None:
    row_options = [RowOptions(temperature=temperature, vocab_limit=limit, draft_id=token)] * 3
    layer = Layer([row(300, i9=9.0), logits, row(300, i299=9.0)], row_options)
    tokens, statuses, allowed = layer.results(3)
    assert (statuses[1], allowed[1]) == (status, int(status is RowStatus.OK))
    if temperature == 0.0 or logits.count(max(logits)) == 1:  # noise decides among equals
        assert tokens[1] == token


def test_edited_rows_do_not_use_precomputed_maxima() -> None:
    values = [row(200, i70=3.0, i150=2.0)] * 5
    row_options = [
        RowOptions(temperature=0.0, banned=[70]),
        RowOptions(temperature=0.0, bias={199: 9.0}),
        RowOptions(temperature=0.0, presence=2.0, prompt=[3], output=[70]),
        RowOptions(temperature=0.0, mask=[0] * 4 + [1 << 22] + [0] * 2),
        RowOptions(temperature=0.0),
    ]
    assert Layer(values, row_options).results(5)[0] == [150, 199, 150, 150, 70]


def test_rows_after_a_rejected_draft_are_skipped() -> None:
    values = [row(200, i70=3.0), row(200, i150=2.0), row(200, i1=1.0)]
    row_options = [RowOptions(temperature=0.0, draft_id=draft) for draft in (70, 151, -1)]
    found = Layer(values, row_options, stop=True).results(3)
    assert (
        found
        == sampled_from_all(values, row_options, stop=True)
        == ([70, 150, -1], [0, 0, RowStatus.SKIPPED], [1, 0, 0])
    )


@pytest.mark.parametrize("quantization", [NO_QUANTIZATION, *FORMS])
@pytest.mark.parametrize("vocab_size", [48, 4700])
def test_every_row_count_and_format_writes_the_maxima_of_every_block(quantization: str, vocab_size: int) -> None:
    max_rows, weight = 45, pack_linear(random_rows(vocab_size, 96, "bfloat16", 1), None, quantization)
    x, out, batch = (
        random_rows(max_rows, 96, "bfloat16", 2),
        paddle.zeros([max_rows, vocab_size]),
        SamplingBatch(max_rows),
    )
    batch.float_params.array[:, 0] = 0.0

    def compute() -> None:
        linear(x, weight, out, max_rows)
        sample(out, batch, max_rows)

    graph = OpGraph(compute)
    for rows in (1, 2, 8, 9, 16, 17, 25, max_rows):
        graph.replay(rows, 0)
        assert batch.token_ids.array[:rows].tolist() == out.numpy()[:rows].argmax(axis=1).tolist()
        assert not batch.status.array[:rows].any()


def test_maxima_are_not_used_if_another_operator_wrote_the_logits_last() -> None:
    table, ids, vocab_size = paddle.eye(4, 200), paddle.to_tensor(np.array([3, 1], np.int32)), 200
    out, other, batch = paddle.zeros([2, vocab_size]), paddle.zeros([2, vocab_size]), SamplingBatch(2)
    batch.float_params.array[:, 0] = 0.0
    x, weight = paddle.ones([2, 2]), pack_linear(paddle.eye(vocab_size, 2))

    def overwritten() -> None:
        linear(x, weight, out, 2)
        embedding(ids, table, out, 2)
        sample(out, batch, 2)

    def of_others() -> None:
        linear(x, weight, other, 2)
        sample(out, batch, 2)

    for compute in (overwritten, of_others):
        graph = OpGraph(compute)
        assert f"Linear [{vocab_size}, 2]" in graph.describe()
        graph.replay(2, 0)
        assert batch.token_ids.array.tolist() == [3, 1]
