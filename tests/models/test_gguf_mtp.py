# SPDX-License-Identifier: Apache-2.0
"""Layers for multi-token prediction in GGUF files keep the codes of their types, whatever types their target has."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import paddle
import pytest

from fastdeploy.config.model_config import ModelConfig
from fastdeploy.config.quantization import GGUF, QuantizationConfig
from fastdeploy.models import mtp
from fastdeploy.models.decoder import CausalLM
from fastdeploy.models.loader import load_head, load_model
from fastdeploy.models.mtp import HEAD_FOR_DRAFTS, load_mtp_layers
from fastdeploy.models.own_codes import Form
from fastdeploy.models.packing import pack_checkpoint
from fastdeploy.ops.linear import pack_linear
from fastdeploy.ops.quantized_form import FORMS, QuantizedForm, form_of
from tests.gguf.gguf_files import gguf_path
from tests.gguf.rewritten import rewrite
from tests.models.gguf_weights import Formats, config_of, formats
from tests.models.test_own_codes import Definitions
from tests.models.test_packed_weights import leaves
from tests.ops.quantized import stored_codes

HEAD, TABLE = "blk.3.nextn.shared_head_head.weight", "blk.3.nextn.embed_tokens.weight"
W4A8 = QuantizedForm("w4a8", 32)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the files' folders be derived in a cache of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def write(path: Path, kind: str, has_own_tables: bool = False, **others: str) -> Path:
    """Write the model with its layer in a type, and other ones for tensors whose names begin with these words."""
    return rewrite(
        gguf_path("glm4moe_mtp"),
        path,
        lambda name: next((other for begin, other in others.items() if name.startswith(begin)), kind),
        () if has_own_tables else (HEAD, TABLE),
    )


def load(config: ModelConfig, wanted: Formats = "") -> CausalLM:
    return load_model(config, max_rows=64, max_model_len=64, quantization=formats(wanted))


def of_layers(config: ModelConfig, wanted: Formats = "") -> QuantizationConfig:
    """Return the formats of the layers in an engine with these formats."""
    return config.weight_formats(formats(wanted)).for_mtp_layers(config.dtype)


def forms_of(weights: mtp.MTPWeights) -> dict[str, Form]:
    layers = {"emb": weights.emb_projection, "hidden": weights.hidden_projection, "qkv": weights.block.attention.qkv}
    return {name: form_of(packed) for name, packed in layers.items()}


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ({"kind": "Q4_0", "blk.3.": "Q8_0"}, QuantizedForm("wint8", 32)),
        ({"kind": "Q8_0", "blk.3.": "Q4_1"}, QuantizedForm("wint4", 32, has_minimum=True)),
        ({"kind": "BF16", "blk.3.": "Q5_0"}, QuantizedForm("wint8", 32)),
        ({"kind": "Q5_1", "blk.3.": "F16"}, None),
    ],
)
def test_a_layer_has_its_own_types_and_its_halves_of_the_projection_keep_every_code(
    kinds: dict[str, str], expected: Form, tmp_path: Path, loaded: list[list[mtp.MTPWeights]]
) -> None:
    path = write(tmp_path / "mixed.gguf", **kinds)
    config = config_of(path)
    load_mtp_layers(load(config), None, "default_v1", of_layers(config))
    ((weights,),) = loaded
    assert forms_of(weights) == dict.fromkeys(("emb", "hidden", "qkv"), expected)
    if expected is not None:
        codes = Definitions(path)("model.layers.3.eh_proj.weight").codes
        halves = [stored_codes(half) for half in (weights.emb_projection, weights.hidden_projection)]
        np.testing.assert_array_equal(np.concatenate(halves, axis=1), codes)


@pytest.mark.parametrize(
    ("output", "wanted", "expected"),
    [
        ("Q8_0", "", W4A8),
        ("Q8_0", "w8a8", W4A8),
        ("Q8_0", "w4a8", W4A8),
        ("Q8_0", "none", W4A8),
        ("Q8_0", {"head": "w4a8", "attention": GGUF, "mlp": GGUF, "experts": GGUF}, None),
        ("Q4_0", "", W4A8),
        ("Q4_0", "w8a8", None),
        ("Q4_1", "", QuantizedForm("w4a8", 32, has_minimum=True)),
        ("Q4_1", "w4a8", None),
        ("F16", "", W4A8),
    ],
)
def test_a_layer_without_a_head_has_a_copy_in_four_bits_unless_the_targets_is_the_same(
    output: str, wanted: Formats, expected: Form, tmp_path: Path, loaded: list[list[mtp.MTPWeights]]
) -> None:
    config = config_of(write(tmp_path / "head.gguf", "Q5_0", output=output), kv_cache_dtype="int8")
    target = load(config, wanted)
    (layer,) = load_mtp_layers(target, None, "default_v1", of_layers(config, wanted))
    assert (None if layer.own_head is None else form_of(layer.own_head)) == expected
    assert (layer.head is target.shared.head) == (expected is None)
    header = pack_checkpoint(config, tmp_path / "packed", formats(wanted))
    assert (HEAD_FOR_DRAFTS in header.entries) == (expected is not None)
    packed = load(ModelConfig.from_pretrained(tmp_path / "packed", kv_cache_dtype="int8"))
    load_mtp_layers(packed, None, "default_v1", header.mtp_quantization)
    assert leaves(tuple(loaded[0])) == leaves(tuple(loaded[1]))


def test_the_files_own_codes_may_be_asked_for_and_need_no_second_head(tmp_path: Path) -> None:
    config = config_of(write(tmp_path / "own.gguf", "Q5_0", output="Q8_0"))
    target = load(config, "w8a8")
    own = load(config)
    formats = QuantizationConfig.from_value(GGUF).for_model(has_experts=True)
    assert [load_mtp_layers(own, None, "default_v1", formats)[0].own_head] == [None]
    head = load_mtp_layers(target, None, "default_v1", formats)[0].own_head
    assert head is not None and form_of(head) == QuantizedForm("wint8", 32)


@pytest.mark.parametrize(
    ("name", "quantization"), [("llama_k", "w4a8"), ("qwen2_q8_0", "w4a8"), ("ernie4_5_k", "w4a8")]
)
def test_a_copy_of_a_head_is_made_from_its_codes_or_from_its_values(name: str, quantization: str) -> None:
    config, defined = config_of(gguf_path(name)), Definitions(gguf_path(name))
    stored = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
    head = load_head(config, "default_v1", "w4a8")
    if defined.kind(stored) == "Q4_K":
        np.testing.assert_array_equal(stored_codes(head), defined(stored).codes)
        assert form_of(head) == QuantizedForm("w4a8", 32, has_minimum=True)
    else:
        values = paddle.to_tensor(defined(stored).values()).astype("bfloat16")
        assert bool((head.data == pack_linear(values, None, "w4a8").data).all())
        assert form_of(head) == FORMS["w4a8"]


@pytest.mark.parametrize("has_own_tables", [False, True])
@pytest.mark.parametrize("wanted", ["", "w8a8", "w4a8", "wint4", "none"])
def test_packed_layers_have_the_bits_of_the_files(
    wanted: str, has_own_tables: bool, tmp_path: Path, loaded: list[list[mtp.MTPWeights]]
) -> None:
    config = config_of(
        write(tmp_path / "mtp.gguf", "Q4_1", has_own_tables, **{"blk.3.": "Q8_0"}), kv_cache_dtype="int8"
    )
    header = pack_checkpoint(config, tmp_path / "packed", formats(wanted))
    packed = load(ModelConfig.from_pretrained(tmp_path / "packed", kv_cache_dtype="int8"))
    for target in (packed, load(config, wanted)):
        load_mtp_layers(target, None, "default_v1", header.mtp_quantization)
    assert leaves(tuple(loaded[0])) == leaves(tuple(loaded[1]))
    assert ("model.layers.3.embed_tokens.weight" in header.entries) == has_own_tables
    assert (loaded[0][0].embedding is not None) == has_own_tables
