# SPDX-License-Identifier: Apache-2.0
"""Random words and the noise computed from them: published vectors, golden bits, measured errors."""

from types import ModuleType

import numpy as np
import pytest

from fastdeploy.ops.reference import sampling as reference
from tests.ops import noise
from tests.ops.noise import gumbel_noise, gumbel_of_words, philox4x32

PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
KNOWN_ANSWERS = [  # (counter, key low, key high, words): the known-answer vectors that the authors of Philox publish
    ((0, 0, 0, 0), 0, 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, 0xFFFFFFFF, 0xFFFFFFFF, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (PI, 0xA4093822, 0x299F31D0, (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
]
GOLDEN_TRANSFORM = [
    (0, "0x1.6dfb52p+4"),
    (1, "0x1.5c6768p+4"),
    (2, "0x1.543b10p+4"),
    (255, "0x1.0a3326p+4"),
    (65535, "0x1.62e430p+3"),
    (8388608, "0x1.8f30b2p+2"),
    (16777217, "0x1.62c422p+2"),
    (1257966797, "0x1.0f45e2p+0"),
    (2147483647, "0x1.774f2ap-2"),
    (2147483648, "0x1.774f2ap-2"),
    (3037000499, "-0x1.a48b46p-3"),
    (4293918720, "-0x1.0f2788p+1"),
    (4294967167, "-0x1.6d12dcp+1"),
    (4294967295, "-0x1.90a3aap+1"),
]
GOLDEN_SEED, GOLDEN_POSITION = 0x0123456789ABCDEF, 2**32 + 7
GOLDEN_NOISE = [
    (0, "-0x1.1e1980p-2"),
    (1, "0x1.1318c4p+0"),
    (2, "-0x1.9e54fap-4"),
    (3, "0x1.0a7484p+0"),
    (4, "0x1.013c62p-1"),
    (63, "0x1.157fcep-1"),
    (64, "0x1.793828p+0"),
    (65, "-0x1.5ecaa0p-4"),
    (500, "0x1.ead8eep-2"),
    (999, "0x1.2f94ccp-2"),
]


@pytest.mark.parametrize("implementation", [noise, reference], ids=["native", "reference"])
@pytest.mark.parametrize(("counter", "low", "high", "words"), KNOWN_ANSWERS)
def test_philox_returns_the_published_words(
    implementation: ModuleType, counter: tuple, low: int, high: int, words: tuple
) -> None:
    assert implementation.philox4x32(np.array([counter], np.uint32), low | high << 32).tolist() == [list(words)]


@pytest.mark.parametrize(("word", "expected"), GOLDEN_TRANSFORM)
def test_transform_of_a_word_is_golden(word: int, expected: str) -> None:
    assert float(gumbel_of_words(np.array([word], np.uint32))[0]) == float.fromhex(expected)


def test_noise_of_ids_is_golden() -> None:
    noise = gumbel_noise(GOLDEN_SEED, GOLDEN_POSITION, 1000)
    assert [(v, float(noise[v])) for v, _ in GOLDEN_NOISE] == [(v, float.fromhex(x)) for v, x in GOLDEN_NOISE]


@pytest.mark.parametrize("vocab_size", [1, 3, 4, 63, 64, 65, 1000, 151_936])
def test_noise_of_an_id_is_the_transform_of_its_word_for_any_vector_width(vocab_size: int) -> None:
    seed, position = 2**64 - 3, 2**40 + 11
    counters = np.zeros(((vocab_size + 3) // 4, 4), np.uint32)
    counters[:, 0] = np.arange(len(counters))
    counters[:, 2], counters[:, 3] = position & 0xFFFFFFFF, position >> 32
    words = philox4x32(counters, seed).reshape(-1)[:vocab_size]
    got, want = gumbel_noise(seed, position, vocab_size), gumbel_of_words(words)
    assert np.array_equal(got.view(np.int32), want.view(np.int32))


def test_all_bits_of_seed_and_position_are_used() -> None:
    plain = gumbel_noise(1, 1, 8)
    for seed, position in ((2, 1), (1 + 2**32, 1), (1 + 2**63, 1), (1, 2), (1, 1 + 2**32), (1, 1 + 2**62)):
        assert not np.array_equal(gumbel_noise(seed, position, 8), plain)


def test_the_error_is_within_the_documented_bounds() -> None:
    edges = [np.arange(4096), 2**31 + np.arange(-2048, 2048), 2**32 - 1 - np.arange(4096)]
    words = np.concatenate([*edges, np.random.default_rng(0).integers(0, 2**32, 200_000)]).astype(np.uint32)
    w = (words.astype(np.float64) + 0.5) * 2.0**-32
    exact = -np.log(-np.log1p(-w))
    error = np.abs(gumbel_of_words(words) - exact)
    assert error[exact < 4].max() < 3e-7
    assert (error / np.spacing(np.abs(exact).astype(np.float32)))[exact >= 4].max() < 0.8


def test_large_noise_is_finely_resolved() -> None:
    noise = gumbel_of_words(np.arange(200_000, dtype=np.uint32))  # the 200,000 largest values: about 23 down to 10
    assert (np.diff(noise) <= 0).all()
    assert len(np.unique(noise[:1000])) == 1000


def test_noise_is_finite_at_both_ends() -> None:
    low, high = gumbel_of_words(np.array([2**32 - 1, 0], np.uint32))
    assert -3.2 < low < -3.1 and 22.8 < high < 22.875
