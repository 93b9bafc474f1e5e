# SPDX-License-Identifier: Apache-2.0
"""Models with quantized weights: row independence, distance from the unquantized model, formats per part."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from paddle import Tensor

from fastdeploy.config.model_config import ModelConfig
from fastdeploy.config.quantization import FORMATS, UNQUANTIZED, QuantizationConfig
from fastdeploy.core.errors import ConfigError
from fastdeploy.models.loader import load_model
from fastdeploy.models.weight_source import SafetensorsSource
from tests.models.model_driver import GOLDEN, MAX_MODEL_LEN, MAX_ROWS, Driver, load_golden, log_softmax
from tests.models.reference_backend import reference_backend
from tests.models.test_row_independence import NUM_TOKENS, assert_same_bits, tokens_of

QUANTIZED = [name for name in FORMATS if name != "none"]
NAMES = ["ernie4_5", "llama_untied_bias", "qwen3"]
# Log-probabilities over 60 tokens. Largest difference between native and reference operators: where inputs are rounded
# to 127 steps, a last bit of bf16 decides more. Mean difference from bf16: large because the weights are random.
NATIVE_TOLERANCE = dict.fromkeys(("wint8", "wint4", "wint4_min"), 0.05) | dict.fromkeys(
    ("w8a8", "w4a8", "w4a8_min"), 0.12
)
MEAN_TOLERANCE = {name: 0.02 if name in ("wint8", "w8a8") else 0.2 for name in QUANTIZED}


@pytest.mark.parametrize("quantization", QUANTIZED)
@pytest.mark.parametrize("name", NAMES)
def test_chunked_prefill_and_decoding_equal_prefill_at_once(name: str, quantization: str) -> None:
    driver = Driver(load_golden(name, "bfloat16", quantization))
    tokens = tokens_of(1)
    whole = driver.run_alone(tokens)
    for chunks in ([1] * 60, [7] * 8 + [4], [17, 31, 12], [24, 25, 11], [30] + [6] * 5):
        assert_same_bits(driver.run_alone(tokens, chunks), whole)


@pytest.mark.parametrize("quantization", QUANTIZED)
def test_requests_in_a_mixed_batch_equal_requests_alone(quantization: str) -> None:
    driver = Driver(load_golden("qwen3", "bfloat16", quantization))
    texts = [tokens_of(seed) for seed in range(8)]
    alone = [driver.run_alone(text) for text in texts]
    rng = np.random.default_rng(5)
    requests = [driver.start() for _ in texts]
    while any(request.num_computed < NUM_TOKENS for request in requests):
        sizes = rng.choice([0, 1, 1, 4, 6, 17, 30], len(texts))
        work = [
            (request, text[request.num_computed : request.num_computed + size])
            for request, text, size in zip(requests, texts, sizes.tolist(), strict=True)
            if size and request.num_computed < NUM_TOKENS
        ]
        if work:
            driver.step([work[index] for index in rng.permutation(len(work))])
    for request, expected in zip(requests, alone, strict=True):
        assert_same_bits(request.all_logits, expected)


@pytest.mark.parametrize("quantization", QUANTIZED)
def test_a_captured_step_equals_its_operators_called_separately(quantization: str) -> None:
    model, tokens = load_golden("ernie4_5", "bfloat16", quantization), tokens_of(7)
    called, captured = Driver(model, captures=False), Driver(model)
    assert_same_bits(captured.run_alone(tokens, [30] * 2), called.run_alone(tokens, [30] * 2))
    assert captured.forward._graph is not None and called.forward._graph is None


@pytest.mark.parametrize("quantization", QUANTIZED)
@pytest.mark.parametrize("name", NAMES)
def test_logprobs_are_close_to_the_references_and_to_bf16(name: str, quantization: str) -> None:
    def logprobs(quantization: str) -> NDArray[np.float64]:
        return log_softmax(Driver(load_golden(name, "bfloat16", quantization)).run_alone(tokens_of(3)))

    plain, found = logprobs("none"), logprobs(quantization)
    with reference_backend():
        expected = logprobs(quantization)
    assert np.abs(found - expected).max() <= NATIVE_TOLERANCE[quantization]
    assert 0 < np.abs(found - plain).mean() <= MEAN_TOLERANCE[quantization]


def test_config_json_asks_for_formats_over_plain_weights(tmp_path: Path) -> None:
    def write(quantization: dict[str, object]) -> ModelConfig:
        raw = json.loads((GOLDEN / "qwen3" / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(raw | {"quantization_config": quantization}))
        return ModelConfig.from_pretrained(tmp_path, dtype="bfloat16")

    shutil.copy(GOLDEN / "qwen3" / "model.safetensors", tmp_path)
    config, tokens = write({"quantization": "w8a8"}), tokens_of(5, 20)
    for given, expected in ((UNQUANTIZED, "w8a8"), (QuantizationConfig.from_value("none"), "none")):
        model = load_model(config, max_rows=MAX_ROWS, max_model_len=MAX_MODEL_LEN, quantization=given)
        assert_same_bits(
            Driver(model).run_alone(tokens), Driver(load_golden("qwen3", "bfloat16", expected)).run_alone(tokens)
        )
    mixed = write({"quantization": "mix_quant", "dense_quant_type": "wint8", "moe_quant_type": "wint4"})
    assert str(mixed.quantization.for_model(True)) == str(QuantizationConfig.from_value("wint4").for_model(True))
    with pytest.raises(ConfigError, match=r"config.json: quantization.dense_quant_type: expected one of none"):
        write({"quantization": "mix_quant", "dense_quant_type": "fp8", "moe_quant_type": "wint4"})


@pytest.mark.parametrize("part", ["attention", "mlp", "head"])
@pytest.mark.parametrize("name", ["qwen3", "llama_untied_bias"])
def test_each_part_is_quantized_independently(name: str, part: str) -> None:
    tokens = tokens_of(4, 20)
    plain, one = load_golden(name, "bfloat16"), load_golden(name, "bfloat16", {part: "wint8"})
    is_held_twice = part == "head" and one.config.tie_word_embeddings
    assert (one.num_weight_bytes > plain.num_weight_bytes) == is_held_twice
    assert (Driver(one).run_alone(tokens) != Driver(plain).run_alone(tokens)).any()
    assert one._head.weight.quantization == ("wint8" if part == "head" else "none")


def test_a_tied_embedding_is_not_quantized_with_the_head() -> None:
    model = load_golden("ernie4_5", "bfloat16", "wint8")
    assert model.config.tie_word_embeddings
    plain = SafetensorsSource(GOLDEN / "ernie4_5").read("model.embed_tokens.weight").astype("bfloat16")
    table = model._embedding.table
    assert isinstance(table, Tensor)
    assert (table.astype("float32").numpy() == plain.astype("float32").numpy()).all()


def test_quantization_needs_bfloat16() -> None:
    with pytest.raises(ConfigError, match="wint8 needs dtype bfloat16, got float32"):
        load_golden("qwen3", "float32", "wint8")


@pytest.mark.parametrize(
    ("value", "dense", "with_experts"),
    [
        ("none", "none", "none"),
        ("wint8", "wint8", "wint8"),
        (
            "wint4",
            "attention wint4, mlp wint4, head wint8",
            "attention wint8, mlp wint8, experts wint4, head wint8",
        ),
        ("w4a8", "attention w4a8, mlp w4a8, head w8a8", "attention w8a8, mlp w8a8, experts w4a8, head w8a8"),
        (
            {"mlp": "w8a8"},
            "attention none, mlp w8a8, head none",
            "attention none, mlp w8a8, experts none, head none",
        ),
        ({"quantization": "WINT8", "is_quantized": False, "kv_cache_quant_type": None}, "wint8", "wint8"),
    ],
)
def test_a_value_means_a_format_for_each_part_of_a_model(
    value: str | dict[str, object], dense: str, with_experts: str
) -> None:
    given = QuantizationConfig.from_value(value)
    assert given.is_given and QuantizationConfig.from_value(given.to_value()) == given
    for has_experts, expected in ((False, dense), (True, with_experts)):
        formats = given.for_model(has_experts)
        assert str(formats) == expected
        assert formats.for_model(has_experts) == formats


def test_experts_have_a_format_of_their_own() -> None:
    all_in_four_bits = {"attention": "wint4", "mlp": "wint4", "experts": "wint4", "head": "wint4"}
    assert str(QuantizationConfig.from_value(all_in_four_bits).for_model(True)) == "wint4"
    mixed = {"quantization": "mix_quant", "dense_quant_type": "wint8", "moe_quant_type": "wint4"}
    given = QuantizationConfig.from_value(mixed)
    assert given.for_model(True) == QuantizationConfig.from_value("wint4").for_model(True)
    for value in (given, QuantizationConfig.from_value({"experts": "none"})):
        with pytest.raises(ConfigError, match="the model has no experts; expected attention, mlp, head") as caught:
            value.for_model(False)
        assert caught.value.field == "quantization.experts"
    assert str(given.for_draft_model().for_model(False)) == "wint8"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"moe_quant_type": None}, "quantization.moe_quant_type: expected one of none, wint8, .* got None"),
        ({"dense_quant_type": "block_wise_fp8"}, "quantization.dense_quant_type: expected one of none, .*fp8"),
        ({"is_quantized": True}, "quantization.is_quantized: .* offline by FastDeploy are not supported"),
        ({"kv_cache_quant_type": "int8"}, "quantization.kv_cache_quant_type: .*use --kv-cache-dtype int8"),
        ({"image_moe_quant_type": "wint4"}, "quantization.image_moe_quant_type: unknown key beside .* 'mix_quant'"),
        ({"quantization": "wint4"}, "quantization.dense_quant_type: unknown key beside quantization 'wint4'"),
        ({"quantization": 4, "dense_quant_type": None, "moe_quant_type": None}, "expected mix_quant or a format"),
    ],
)
def test_a_wrong_key_of_fastdeploys_mapping_is_named(change: dict[str, object], message: str) -> None:
    mixed = {"quantization": "mix_quant", "dense_quant_type": "wint8", "moe_quant_type": "wint4"}
    with pytest.raises(ConfigError, match=message):
        QuantizationConfig.from_value(mixed | change)


@pytest.mark.parametrize(
    ("value", "field"),
    [("int8", "quantization"), ({"moe": "wint4"}, "quantization.moe"), ({"mlp": 4}, "quantization.mlp")],
)
def test_unknown_formats_and_parts_are_refused_by_name(value: str | dict[str, str], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        QuantizationConfig.from_value(value)
    assert caught.value.field == field
