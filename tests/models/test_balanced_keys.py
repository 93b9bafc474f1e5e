# SPDX-License-Identifier: Apache-2.0
"""Balanced keys keep every bit of a score, and lose less in a cache of eight bits if pairs of channels differ."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import paddle
import pytest
from numpy.typing import NDArray
from safetensors.paddle import load_file, save_file

from fastdeploy.config.model_config import ModelConfig
from fastdeploy.config.quantization import UNQUANTIZED
from fastdeploy.models import attention_part
from fastdeploy.models.balanced_keys import (
    MAX_EXPONENT,
    Exponents,
    choose_exponents,
    pairs_of_channels,
    powers_of_two,
    scale_outputs,
    squared_lengths,
)
from fastdeploy.models.decoder import CausalLM
from fastdeploy.models.loader import load_model
from fastdeploy.models.mtp import load_mtp_layers
from fastdeploy.models.registry import find_architecture
from fastdeploy.ops.linear import QUANTIZATIONS, WeightPiece
from tests.gguf.gguf_files import gguf_path
from tests.gguf.rewritten import rewrite
from tests.models.gguf_weights import config_of, formats, weights_of
from tests.models.model_driver import (
    GOLDEN,
    GOLDEN_NAMES,
    LATENT,
    MAX_MODEL_LEN,
    MAX_ROWS,
    Driver,
    load_golden,
    log_softmax,
)
from tests.models.mtp_training import DEMO
from tests.models.reference_backend import reference_backend
from tests.models.test_mtp_experts import GLM, GLM_LAYER, Chain
from tests.models.test_own_codes import Definitions, one_hot_outputs
from tests.models.test_row_independence import assert_same_bits, tokens_of
from tests.ops.quantized import stored_codes

QUANTIZED = [(name, q) for q in QUANTIZATIONS for name in ("llama_untied_bias", "glm4_moe_air")]
SPREAD = ["llama_partial_rotary", "qwen2", "qwen3", "ernie4_5_bias", "ernie4_5_moe", "glm4_moe"]


def test_channels_that_are_rotated_together_form_a_pair_and_others_are_alone() -> None:
    assert pairs_of_channels(6, 4, False).tolist() == [0, 1, 0, 1, 2, 3]
    assert pairs_of_channels(6, 4, True).tolist() == [0, 0, 1, 1, 2, 3]
    assert pairs_of_channels(4, 4, False).tolist() == [0, 1, 0, 1]


def test_exponents_equal_the_definition_for_each_head_by_itself() -> None:
    squares = 4.0 ** np.random.default_rng(0).uniform(-6, 6, (3, 8))
    pairs = pairs_of_channels(8, 6, False)
    found = choose_exponents(squares, pairs)
    for head, exponents in zip(squares.tolist(), found.tolist(), strict=True):
        lengths = [math.sqrt(sum(s for s, of in zip(head, pairs) if of == pair)) for pair in range(5)]
        mean = math.prod(length**0.75 for length in lengths) ** (1 / 5)
        assert exponents == [round(math.log2(lengths[pair] ** 0.75 / mean)) for pair in pairs]
    assert np.abs(found).max() > 2
    np.testing.assert_array_equal(choose_exponents(squares * 4.0**50, pairs), found)


def test_pairs_of_length_zero_do_not_count_and_exponents_are_bounded() -> None:
    pairs = pairs_of_channels(3, 0, False)
    assert choose_exponents(np.array([[0.0, 1.0, 4.0**4], [0.0, 0.0, 0.0]]), pairs).tolist() == [[0, -2, 2], [0, 0, 0]]
    assert choose_exponents(np.array([[4.0**-100, 0.0, 4.0**100]]), pairs).tolist() == [
        [-MAX_EXPONENT, 0, MAX_EXPONENT]
    ]


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_lengths_and_scaled_outputs_are_those_of_the_pieces_rows(is_transposed: bool, has_bias: bool) -> None:
    random = np.random.default_rng(1)
    weight, norm, bias = (paddle.to_tensor(random.normal(size=size)).astype("bfloat16") for size in ((150, 9), 9, 143))
    stored = weight.t().contiguous() if is_transposed else weight
    pieces = [WeightPiece(stored, begin, end, is_transposed) for begin, end in ((3, 5), (9, 150))]
    rows = np.concatenate([weight.astype("float64").numpy()[begin:end] for begin, end in ((3, 5), (9, 150))])
    expected = ((rows * norm.astype("float64").numpy()) ** 2).sum(1)
    expected += bias.astype("float64").numpy() ** 2 if has_bias else 0.0
    np.testing.assert_allclose(squared_lengths(pieces, norm, bias if has_bias else None), expected, rtol=1e-12)
    exponents = random.integers(-MAX_EXPONENT, MAX_EXPONENT + 1, 143)
    scaled = scale_outputs(pieces, powers_of_two(exponents))
    found = paddle.concat([piece.rows() for piece in scaled]).astype("float64").numpy()
    np.testing.assert_array_equal(found, rows * 2.0 ** exponents[:, None])
    assert {piece.is_transposed for piece in scaled} == {is_transposed}


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_exponents_follow_from_the_weights_biases_and_norms_of_each_layer(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[NDArray[np.float64]] = []

    def record(squares: NDArray[np.float64], pairs: NDArray[np.intp]) -> Exponents:
        found.append(squares)
        return choose_exponents(squares, pairs)

    monkeypatch.setattr(attention_part, "choose_exponents", record)
    config = load_golden(name, "bfloat16", has_int8_cache=True).config
    tensors = load_file(GOLDEN / name / "model.safetensors")
    stored = {key: value.astype("bfloat16").astype("float64").numpy() for key, value in tensors.items()}
    for index, squares in enumerate(found):
        prefix = f"model.layers.{index}."
        weight, norm = (stored[f"{prefix}{part}.weight"] for part in ("self_attn.k_proj", "input_layernorm"))
        if name == "qwen3":
            expected = stored[f"{prefix}self_attn.k_norm.weight"] ** 2
        else:
            expected = ((weight * norm) ** 2).sum(1) + stored[f"{prefix}self_attn.k_proj.bias"] ** 2
        np.testing.assert_allclose(squares, expected.reshape(-1, config.head_dim), rtol=1e-12)
    assert len(found) == config.num_layers


def force_exponents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make all exponents random, so that every pair of every head has another one, whatever the weights are."""
    random = np.random.default_rng(2)

    def choose(squares: NDArray[np.float64], pairs: NDArray[np.intp]) -> Exponents:
        return random.integers(-6, 7, (len(squares), pairs.max() + 1)).astype(np.int8)[:, pairs]

    monkeypatch.setattr(attention_part, "choose_exponents", choose)


def with_wide_cache(model: CausalLM) -> CausalLM:
    """Let a model that was loaded for an int8 cache have one of its activations' dtype."""
    model.config = replace(model.config, has_int8_cache=False)
    return model


GROUPED = [name for name in GOLDEN_NAMES if not name.startswith(LATENT)]


@pytest.mark.parametrize(("name", "quantization"), [*((name, "none") for name in GROUPED), *QUANTIZED])
def test_balanced_keys_change_no_bit_with_a_bf16_cache(
    name: str, quantization: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = load_golden(name, "bfloat16", quantization)
    force_exponents(monkeypatch)
    balanced = with_wide_cache(load_golden(name, "bfloat16", quantization, has_int8_cache=True))
    assert balanced.key_balance and not plain.key_balance
    first, second = Driver(balanced), Driver(plain)
    assert_same_bits(first.run_alone(tokens_of(3), [41, 1, 18]), second.run_alone(tokens_of(3)))
    assert (first.caches[0].key.view("uint16").numpy() != second.caches[0].key.view("uint16").numpy()).any()


def test_balanced_keys_change_no_bit_of_the_reference_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    with reference_backend():
        plain = Driver(load_golden("ernie4_5_bias", "bfloat16")).run_alone(tokens_of(4))
        force_exponents(monkeypatch)
        balanced = with_wide_cache(load_golden("ernie4_5_bias", "bfloat16", has_int8_cache=True))
        assert_same_bits(Driver(balanced).run_alone(tokens_of(4)), plain)


@pytest.mark.parametrize(("target", "path"), [(DEMO, None), (GLM, GLM_LAYER)], ids=["ernie", "deepseek"])
def test_balanced_keys_of_layers_for_multi_token_prediction_change_no_bit(
    target: Path, path: Path | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(ModelConfig.from_pretrained(target, dtype="bfloat16"), max_rows=64, max_model_len=64)
    states = paddle.to_tensor(np.random.default_rng(5).normal(size=(30, model.config.hidden_size))).astype("bfloat16")
    found = []
    for has_int8_cache in (False, True):
        model.config = replace(model.config, has_int8_cache=has_int8_cache)
        (layer,) = load_mtp_layers(model, path and str(path), "default_v1", UNQUANTIZED)
        assert bool(layer.key_balance) == has_int8_cache
        wide = replace(model.config, has_int8_cache=False)
        found.append(Chain(layer, wide)(tokens_of(5, 30), states)[0])
        force_exponents(monkeypatch)
    assert_same_bits(found[1], found[0])


def spread_keys(name: str, folder: Path) -> None:
    """Write a golden model that has the same scores, although half of the pairs are up to 2^6 longer in its keys."""
    config, random = ModelConfig.from_pretrained(GOLDEN / name), np.random.default_rng(6)
    traits, dim, rotated = find_architecture(config).traits(config), config.head_dim, config.rope.rotary_dim
    partners = [c ^ 1 if traits.interleaved_rotary else (c + rotated // 2) % rotated for c in range(rotated)]
    partners += range(rotated, dim)
    num_heads, num_kv_heads = (1, 1) if traits.qk_norm else (config.num_heads, config.num_kv_heads)
    shutil.copytree(GOLDEN / name, folder)
    tensors = load_file(folder / "model.safetensors")
    for index in range(config.num_layers):
        exponents = random.integers(0, 7, (num_kv_heads, dim)) * random.integers(0, 2, (num_kv_heads, dim))
        exponents = np.maximum(exponents, exponents[:, partners])
        for part, of_part in (("k", exponents), ("q", -np.repeat(exponents, num_heads // num_kv_heads, axis=0))):
            prefix = f"model.layers.{index}.self_attn.{part}_{'norm' if traits.qk_norm else 'proj'}"
            for tensor in tensors.keys() & {f"{prefix}.weight", f"{prefix}.bias"}:
                value = tensors[tensor].astype("float32")
                factors = paddle.to_tensor(2.0 ** of_part.reshape([-1] + [1] * (value.ndim - 1)), "float32")
                tensors[tensor] = value * factors
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def load(folder: Path, kv_cache_dtype: str) -> CausalLM:
    config = ModelConfig.from_pretrained(folder, dtype="bfloat16", kv_cache_dtype=kv_cache_dtype)
    return load_model(config, max_rows=MAX_ROWS, max_model_len=MAX_MODEL_LEN)


@pytest.mark.parametrize("name", SPREAD)
def test_keys_whose_pairs_differ_lose_little_in_eight_bits(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, tokens = tmp_path / "spread", tokens_of(7)
    spread_keys(name, folder)
    exact = Driver(load_golden(name, "bfloat16")).run_alone(tokens)
    for model in (load(folder, "auto"), with_wide_cache(load(folder, "int8"))):
        assert_same_bits(Driver(model).run_alone(tokens), exact)

    def loss(model: CausalLM) -> float:
        return float(np.abs(log_softmax(Driver(model).run_alone(tokens)) - log_softmax(exact)).mean())

    balanced = loss(load(folder, "int8"))
    monkeypatch.setattr(attention_part, "choose_exponents", lambda squares, _: np.zeros(squares.shape, np.int8))
    usual, unbalanced = loss(load(GOLDEN / name, "int8")), loss(load(folder, "int8"))
    assert balanced < 1.5 * usual and balanced < unbalanced / 2


def test_keys_of_float32_are_not_balanced() -> None:
    assert not load_golden("qwen3", "float32").key_balance


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the folders of GGUF files be derived in a cache of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def load_gguf(path: Path, kv_cache_dtype: str, quantization: str = "") -> CausalLM:
    config = config_of(path, kv_cache_dtype=kv_cache_dtype)
    return load_model(config, max_rows=MAX_ROWS, max_model_len=MAX_MODEL_LEN, quantization=formats(quantization))


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("quantization", ["", "w8a8", "wint4", "none"])
@pytest.mark.parametrize("name", ["llama_k", "llama_groups", "qwen2_q8_0", "ernie4_5_q4_1", "glm4moe_groups"])
def test_balanced_keys_of_codes_change_no_bit_with_a_bf16_cache(
    name: str, quantization: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = load_gguf(gguf_path(name), "auto", quantization)
    force_exponents(monkeypatch)
    balanced = with_wide_cache(load_gguf(gguf_path(name), "int8", quantization))
    assert balanced.key_balance and not plain.key_balance
    assert_same_bits(Driver(balanced).run_alone(tokens_of(3), [41, 1, 18]), Driver(plain).run_alone(tokens_of(3)))


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("kinds", [("Q4_0", "Q5_0", "Q8_0"), ("Q4_1", "Q5_1", "Q5_1"), ("Q5_1", "Q4_0", "Q8_0")])
def test_balanced_keys_keep_the_codes_of_a_fused_layer_and_multiply_its_queries_and_keys(
    kinds: tuple[str, str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_part = dict(zip(("attn_q", "attn_k", "attn_v"), kinds))
    path = rewrite(
        gguf_path("llama_f32"), tmp_path / "unlike.gguf", lambda name: of_part.get(name.split(".")[-2], "Q8_0")
    )
    plain = weights_of(config_of(path)).layers[0].attention
    force_exponents(monkeypatch)
    config = config_of(path, kv_cache_dtype="int8")
    balanced = weights_of(config).layers[0].attention
    np.testing.assert_array_equal(stored_codes(balanced.qkv), stored_codes(plain.qkv))
    assert balanced.key_exponents is not None
    of_keys = balanced.key_exponents.numpy()
    of_queries = np.repeat(of_keys, config.num_heads // config.num_kv_heads, axis=0)
    factors = np.ldexp(1.0, np.concatenate([of_queries.ravel(), -of_keys.ravel(), np.zeros_like(of_keys).ravel()]))
    assert len(set(factors.tolist())) > 5
    expected = one_hot_outputs(plain.qkv) * factors[:, None].astype(np.float32)
    np.testing.assert_array_equal(one_hot_outputs(balanced.qkv), expected)


@pytest.mark.usefixtures("own_cache")
def test_exponents_of_codes_follow_from_the_values_for_which_they_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[NDArray[np.float64]] = []

    def record(squares: NDArray[np.float64], pairs: NDArray[np.intp]) -> Exponents:
        found.append(squares)
        return choose_exponents(squares, pairs)

    monkeypatch.setattr(attention_part, "choose_exponents", record)
    for quantization in ("", "none"):
        load_gguf(gguf_path("llama_k"), "int8", quantization)
    defined = Definitions(gguf_path("llama_k"))
    for index in range(2):
        values = defined(f"model.layers.{index}.self_attn.k_proj.weight").values()
        weight = paddle.to_tensor(values).astype("bfloat16").astype("float64").numpy()
        norm = defined.vector(f"model.layers.{index}.input_layernorm.weight")
        norm = paddle.to_tensor(norm).astype("bfloat16").astype("float64").numpy()
        expected = ((weight * norm) ** 2).sum(1).reshape(-1, 16)
        np.testing.assert_allclose(found[index], expected, rtol=1e-12)
        np.testing.assert_array_equal(found[index + 2], found[index])
