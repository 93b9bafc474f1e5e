# SPDX-License-Identifier: Apache-2.0
"""The noise of sampling on an emulated GPU: the published words, and the bits of the CPU's scalar and vector code."""

from __future__ import annotations

import numpy as np
import paddle
import pytest
from numpy.typing import NDArray

from fastdeploy.ops.backends.gpu.library import launch
from tests.ops import noise
from tests.ops.gpu.emulated import SEEDS, count, emulate
from tests.ops.test_gumbel import GOLDEN_NOISE, GOLDEN_POSITION, GOLDEN_SEED, GOLDEN_TRANSFORM, KNOWN_ANSWERS

EDGES = np.array([0, 1, 2, 2**31 - 1, 2**31, 2**31 + 1, 2**32 - 2, 2**32 - 1], np.uint32)
UNUSED = 7.0


def philox4x32(counters: NDArray[np.uint32], key: int) -> NDArray[np.uint32]:
    words = paddle.to_tensor(counters.view(np.int32))
    launch("fd_philox4x32", words, len(counters), key)
    return words.numpy().view(np.uint32)


def gumbel_of_words(words: NDArray[np.uint32]) -> NDArray[np.float32]:
    out = paddle.full([len(words) + 1], UNUSED)
    launch("fd_gumbel_of_words", paddle.to_tensor(words.view(np.int32)), out, len(words))
    assert out[-1] == UNUSED
    return out.numpy()[:-1]


def gumbel_noise(seed: int, position: int, vocab_size: int) -> NDArray[np.float32]:
    out = paddle.full([vocab_size + 1], UNUSED)
    launch("fd_gumbel_noise", out, vocab_size, seed, position)
    assert out[-1] == UNUSED
    return out.numpy()[:-1]


@pytest.mark.parametrize(("counter", "low", "high", "words"), KNOWN_ANSWERS)
def test_gpu_philox_returns_the_published_words(counter: tuple, low: int, high: int, words: tuple) -> None:
    emulate()
    assert philox4x32(np.array([counter], np.uint32), low | high << 32).tolist() == [list(words)]


@pytest.mark.parametrize("size", [1, 127, 128, 129, 1000])
def test_gpu_philox_has_the_words_of_the_cpu(size: int) -> None:
    rng = np.random.default_rng(size)
    counters, key = rng.integers(0, 2**32, (size, 4), np.uint32), int(rng.integers(0, 2**64, dtype=np.uint64))
    emulate(SEEDS[size % 4])
    assert np.array_equal(philox4x32(counters, key), noise.philox4x32(counters, key))


@pytest.mark.parametrize("size", [1, 127, 128, 129, 1000])
def test_gpu_transform_of_words_has_the_bits_of_the_cpu(size: int) -> None:
    words = np.concatenate([EDGES, np.random.default_rng(size).integers(0, 2**32, size, np.uint32)])
    emulate(SEEDS[size % 4])
    assert gumbel_of_words(words).tobytes() == noise.gumbel_of_words(words).tobytes()


def test_gpu_transform_of_a_million_words_and_the_golden_ones() -> None:
    words = np.random.default_rng(1).integers(0, 2**32, 1_000_000, np.uint32)
    emulate(has_checks=False)
    assert gumbel_of_words(words).tobytes() == noise.gumbel_of_words(words).tobytes()
    golden = gumbel_of_words(np.array([word for word, _ in GOLDEN_TRANSFORM], np.uint32))
    assert golden.tolist() == [float.fromhex(value) for _, value in GOLDEN_TRANSFORM]


@pytest.mark.parametrize("vocab_size", [*range(1, 10), 511, 512, 513, 2001])
def test_gpu_noise_of_a_vocabulary_has_the_bits_of_the_cpu(vocab_size: int) -> None:
    for seed, position in ((0, 0), (2**64 - 1, 2**33 + vocab_size), (GOLDEN_SEED, GOLDEN_POSITION)):
        emulate(SEEDS[vocab_size % 4])
        assert gumbel_noise(seed, position, vocab_size).tobytes() == (
            noise.gumbel_noise(seed, position, vocab_size).tobytes()
        )


def test_gpu_noise_is_golden_and_written_in_one_launch_per_vocabulary() -> None:
    emulate(has_checks=False)
    values = gumbel_noise(GOLDEN_SEED, GOLDEN_POSITION, 1000)
    assert [float(values[i]) for i, _ in GOLDEN_NOISE] == [float.fromhex(value) for _, value in GOLDEN_NOISE]
    emulate()
    assert count(lambda: gumbel_noise(1, 2, 1000))["launches"] == 1


def test_gpu_noise_refuses_a_negative_count() -> None:
    emulate()
    with pytest.raises(ValueError, match="gumbel_noise: num_ids: expected 0 to 2147483647, got -1"):
        launch("fd_gumbel_noise", paddle.zeros([1]), -1, 0, 0)
