# SPDX-License-Identifier: Apache-2.0
"""A quantized head that serves as the embedding gives the bits of a plain table of its weights, and counts once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import paddle
import pytest

from fastdeploy.config.model_config import ModelConfig
from fastdeploy.config.quantization import QuantizationConfig
from fastdeploy.layers.embedding import Table
from fastdeploy.models.decoder import CausalLM
from fastdeploy.models.loader import open_source
from fastdeploy.models.mtp import MTPLayer, load_mtp_layers
from fastdeploy.models.registry import find_architecture
from fastdeploy.models.weights import DecoderWeights, load_weights
from fastdeploy.ops.batch_index import BatchIndex
from fastdeploy.ops.buffer import HostBuffer
from fastdeploy.ops.caches import allocate_cache
from fastdeploy.ops.coded_piece import decode
from fastdeploy.ops.linear import pack_linear
from fastdeploy.ops.quantized_form import QUANTIZATIONS, QuantizedForm
from tests.models.model_driver import BLOCK_SIZE, GOLDEN, MAX_MODEL_LEN, MAX_ROWS, Driver
from tests.ops.bits import assert_same_bits, bits
from tests.ops.coded import random_coded

NAME = "ernie4_5"  # tied


def load_config() -> ModelConfig:
    return ModelConfig.from_pretrained(GOLDEN / NAME, dtype="bfloat16")


def load_tied(quantization: str, group_size: int = 32, has_minimum: bool = True) -> tuple[DecoderWeights, Table]:
    """Return weights whose head of codes is also the embedding, and a plain table of its weights."""
    config = load_config()
    architecture = find_architecture(config)
    source, _ = open_source(config, architecture, "default_v1", seed=0)
    weights = load_weights(config, architecture, source)
    width = QuantizedForm(quantization).weight_bits
    piece = random_coded(config.vocab_size, config.hidden_size, width, group_size, has_minimum, 7)
    head = pack_linear([piece], None, quantization)
    return replace(weights, embedding=head, head=head), decode(piece).astype("bfloat16")


def model_of(weights: DecoderWeights) -> CausalLM:
    config = load_config()
    traits = find_architecture(config).traits(config)
    return CausalLM(config, traits, weights, max_rows=MAX_ROWS, max_model_len=MAX_MODEL_LEN)


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize("captures", [True, False])
def test_a_model_with_one_quantized_table_computes_the_bits_of_one_with_two(quantization: str, captures: bool) -> None:
    weights, table = load_tied(quantization)
    tokens = np.random.default_rng(1).integers(0, load_config().vocab_size, 60).tolist()
    tied, untied = (
        Driver(model_of(one), captures=captures).run_alone(tokens, [33, 1, 26])
        for one in (weights, replace(weights, embedding=table))
    )
    np.testing.assert_array_equal(tied.view(np.uint32), untied.view(np.uint32))


def mtp_output(target: CausalLM, tokens: list[int]) -> tuple[MTPLayer, paddle.Tensor]:
    """Return an MTP layer of random weights, and what it computes for a sequence of tokens."""
    formats = QuantizationConfig.from_value({"head": "w8a8"})
    [layer] = load_mtp_layers(target, None, "dummy", formats)
    count = np.array([len(tokens)], np.int32)
    cache = allocate_cache(4, BLOCK_SIZE, target.config.cache_spec)
    metadata = BatchIndex(MAX_ROWS, 1, 4, BLOCK_SIZE).fill(count, np.zeros(1, np.int32), count, [[2, 0, 3, 1]])
    token_ids = HostBuffer(MAX_ROWS, "int32")
    token_ids.array[: len(tokens)] = tokens
    layer.forward(token_ids.tensor, metadata, cache)
    return layer, layer.output[: len(tokens)].clone()


def test_a_layer_for_multi_token_prediction_reads_the_quantized_table_of_its_target() -> None:
    weights, table = load_tied("w8a8", has_minimum=False)
    target, other = model_of(weights), model_of(replace(weights, embedding=table))
    tokens = list(range(20, 29))
    (layer, found), (_, expected) = mtp_output(target, tokens), mtp_output(other, tokens)
    assert layer._embedding is target.shared.embedding and layer.head is target.shared.head
    assert_same_bits(bits(found), bits(expected), "states")
    assert len(np.unique(bits(found), axis=0)) == len(tokens)


def test_the_bytes_of_a_quantized_table_count_once() -> None:
    weights, _ = load_tied("wint8")
    config, head = load_config(), weights.head
    layers = sum(layer.num_bytes for layer in weights.layers)
    # Seven panels of codes, factors, scales and minimums, each filled up to 64 bytes.
    assert head.num_bytes == 7 * (16 * config.hidden_size + 64 + 64 + 64)
    assert weights.num_bytes == weights.num_streamed_bytes == layers + head.num_bytes


def test_a_quantized_table_of_its_own_counts_beside_the_head_and_is_not_streamed() -> None:
    weights, _ = load_tied("wint8")
    config = load_config()
    piece = random_coded(config.vocab_size, config.hidden_size, 4, 32, False, 8)
    own = pack_linear([piece], None, "wint4")
    untied = replace(weights, embedding=own)
    assert untied.num_bytes - untied.num_streamed_bytes == own.num_bytes > 0
    assert untied.num_streamed_bytes == weights.num_streamed_bytes
