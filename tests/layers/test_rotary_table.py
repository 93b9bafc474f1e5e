# SPDX-License-Identifier: Apache-2.0
"""The table of cosines and sines equals that of transformers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from fastdeploy.config.family_defaults import FamilyDefaults
from fastdeploy.config.rope_config import RopeConfig, parse_rope
from fastdeploy.layers.rotary import inverse_frequencies, rotary_table

TABLES = dict(np.load(Path(__file__).resolve().parent.parent / "golden" / "rope_tables.npz"))
SETTINGS = sorted(name.removesuffix(".json") for name in TABLES if name.endswith(".json"))
HEAD_DIM, CONTEXT, DYNAMIC_LEN = 128, 65536, 100000


def setting(name: str) -> RopeConfig:
    raw = {"rope_parameters": json.loads(str(TABLES[f"{name}.json"]))}
    defaults = FamilyDefaults(rope_theta=1.0)
    return parse_rope(raw, head_dim=HEAD_DIM, max_position_embeddings=CONTEXT, defaults=defaults)


@pytest.mark.parametrize("name", SETTINGS)
def test_frequencies_are_those_of_transformers(name: str) -> None:
    found = inverse_frequencies(setting(name), DYNAMIC_LEN)
    np.testing.assert_allclose(found, TABLES[f"{name}.inv_freq"], rtol=2e-6)


@pytest.mark.parametrize("name", SETTINGS)
def test_attention_factors_are_those_of_transformers(name: str) -> None:
    assert setting(name).attention_factor == pytest.approx(float(TABLES[f"{name}.attention_factor"]), rel=1e-12)


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_have_different_frequencies(name: str) -> None:
    others = [inverse_frequencies(setting(other), DYNAMIC_LEN) for other in SETTINGS if other != name]
    found = inverse_frequencies(setting(name), DYNAMIC_LEN)
    assert all(np.abs(found / other - 1.0).max() > 1e-3 for other in others)


def test_table_holds_cosines_then_sines_rounded_once() -> None:
    rope = RopeConfig("default", theta=100.0, rotary_dim=4, max_position_embeddings=16)
    table = rotary_table(rope, 9000)
    assert table.shape == (9000, 4) and table.dtype == np.float32
    for position in (0, 1, 4095, 4096, 8999):
        expected = [np.cos(position), np.cos(position * 0.1), np.sin(position), np.sin(position * 0.1)]
        np.testing.assert_array_equal(table[position], np.array(expected).astype(np.float32))


def test_attention_factor_scales_cosines_and_sines() -> None:
    plain = RopeConfig("yarn", 100.0, 8, 64, factor=4.0, original_max_positions=16)
    scaled = RopeConfig("yarn", 100.0, 8, 64, factor=4.0, original_max_positions=16, attention_factor=1.5)
    np.testing.assert_allclose(rotary_table(scaled, 64), 1.5 * rotary_table(plain, 64), rtol=2e-7, atol=1e-7)


def test_dynamic_base_follows_max_model_len_beyond_the_pretraining_length() -> None:
    rope = RopeConfig("dynamic", 10000.0, 64, 2048, factor=2.0)
    plain = RopeConfig("default", 10000.0, 64, 2048)
    np.testing.assert_array_equal(inverse_frequencies(rope, 100), inverse_frequencies(plain, 100))
    assert (inverse_frequencies(rope, 4096)[1:] < inverse_frequencies(rope, 2048)[1:]).all()


def test_frequencies_are_divided_by_their_factors() -> None:
    plain = RopeConfig("default", 10000.0, 8, 64)
    scaled = RopeConfig("freq_factors", 10000.0, 8, 64, freq_factors=(1.0, 1.5, 3.0, 8.0))
    found = inverse_frequencies(scaled, 64)
    np.testing.assert_allclose(found, inverse_frequencies(plain, 64) / [1.0, 1.5, 3.0, 8.0], rtol=1e-15)
    np.testing.assert_allclose(found, [1.0, 0.1 / 1.5, 0.01 / 3.0, 0.001 / 8.0], rtol=1e-12)


@pytest.mark.parametrize("name", ["llama3", "llama32"])
def test_factors_that_llama_cpp_stores_for_llama3_give_the_frequencies_of_transformers(name: str) -> None:
    llama3 = setting(name)
    exponents = np.arange(0, HEAD_DIM, 2, dtype=np.float32) / np.float32(HEAD_DIM)
    rotations = llama3.original_max_positions / (2.0 * np.pi) / np.float32(llama3.theta) ** exponents
    smooth = np.clip((rotations - llama3.low_freq_factor) / (llama3.high_freq_factor - llama3.low_freq_factor), 0, 1)
    factors = (1.0 / ((1.0 - smooth) / llama3.factor + smooth)).astype(np.float32)
    scaled = RopeConfig("freq_factors", llama3.theta, HEAD_DIM, CONTEXT, freq_factors=tuple(map(float, factors)))
    np.testing.assert_allclose(inverse_frequencies(scaled, CONTEXT), TABLES[f"{name}.inv_freq"], rtol=2e-6)
