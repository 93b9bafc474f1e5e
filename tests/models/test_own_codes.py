# SPDX-License-Identifier: Apache-2.0
"""Codes of GGUF files are kept where a format has room for them, and layers have the widest of their weights' forms."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from numpy.typing import NDArray

from fastdeploy.config.model_config import ModelConfig
from fastdeploy.config.quantization import ALL_FORMATS, FORMATS, GGUF, QuantizationConfig
from fastdeploy.core.errors import ConfigError
from fastdeploy.core.ggml_types import PLAIN_TYPES
from fastdeploy.gguf.file import GGUFFile
from fastdeploy.gguf.model_config import make_config_json
from fastdeploy.gguf.tensor_names import tensor_names
from fastdeploy.models.own_codes import Form, keeps_codes, packed_form, packing_format, table_format
from fastdeploy.models.weights import DecoderWeights
from fastdeploy.ops.backends.cpu import library
from fastdeploy.ops.examples import random_rows
from fastdeploy.ops.ggml_blocks import code_bits, fidelity
from fastdeploy.ops.linear import PackedLinear, linear, pack_linear
from fastdeploy.ops.quantized_form import FORMS, QuantizedForm, form_of
from tests.gguf.gguf_files import NAMES, gguf_path
from tests.gguf.rewritten import rewrite, stored_rows
from tests.models.gguf_weights import Packed, config_of, packed_layers, source_of, weights_of
from tests.models.model_driver import GOLDEN
from tests.ops.coded import random_coded
from tests.ops.ggml_definitions import Decoded, decode
from tests.ops.quantized import stored_codes

Q4_0, Q4_1 = QuantizedForm("wint4", 32), QuantizedForm("wint4", 32, has_minimum=True)
Q8_0, Q5_1 = QuantizedForm("wint8", 32), QuantizedForm("wint8", 32, has_minimum=True)
QUANTIZED = [name for name in NAMES if name not in ("llama_f32", "glm4moe_mtp")]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the files' folders be derived in a cache of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.mark.parametrize(
    ("stored", "wanted", "expected"),
    [
        ([Q4_0], GGUF, Q4_0),
        ([Q4_0, Q8_0], GGUF, Q8_0),
        ([Q4_0, Q4_1], GGUF, Q4_1),
        ([Q4_1, Q8_0, Q4_0], GGUF, Q5_1),
        ([QuantizedForm("wint4", 128), Q4_0, QuantizedForm("wint4", 64)], GGUF, Q4_0),
        ([QuantizedForm("wint4", 128), QuantizedForm("wint8", 64)], GGUF, QuantizedForm("wint8", 64)),
        ([QuantizedForm("wint4"), QuantizedForm("wint8", 64), Q4_1], GGUF, Q5_1),
        ([QuantizedForm("w8a8"), QuantizedForm("w8a8")], "compressed-tensors", QuantizedForm("w8a8")),
        ([QuantizedForm("w4a8", 128), QuantizedForm("w8a8")], "compressed-tensors", QuantizedForm("w8a8", 128)),
        ([QuantizedForm("wint4", 128), QuantizedForm("w8a8")], "compressed-tensors", QuantizedForm("wint8", 128)),
        ([Q4_0, None], GGUF, None),
        ([None], GGUF, None),
        ([Q4_1, Q8_0], "wint8", Q5_1),
        ([Q4_1], "wint8", Q4_1),
        ([Q4_0], "w8a8", QuantizedForm("w4a8", 32)),
        ([Q4_0, Q5_1], "w8a8", QuantizedForm("w8a8", 32, has_minimum=True)),
        ([Q4_1], "w4a8", QuantizedForm("w4a8", 32, has_minimum=True)),
        ([Q4_0], "w4a8_min", QuantizedForm("w4a8", 32)),
        ([Q4_0, Q8_0], "w4a8", FORMS["w4a8"]),
        ([Q8_0], "wint4_min", FORMS["wint4_min"]),
        ([Q4_0, None], "w8a8", FORMS["w8a8"]),
        ([None], "wint8", FORMS["wint8"]),
        ([Q4_0], "none", None),
        ([None], "none", None),
    ],
)
def test_a_layer_has_the_widest_form_of_its_weights_if_its_format_has_room_for_their_codes(
    stored: list[Form], wanted: str, expected: Form
) -> None:
    assert packed_form(stored, wanted) == expected


@pytest.mark.parametrize("wanted", ALL_FORMATS)
def test_what_is_packed_has_the_form_that_is_told_before(wanted: str) -> None:
    for stored in product((Q4_0, Q4_1, Q8_0, Q5_1, None), repeat=2):
        if keeps_codes(stored, wanted):
            pieces: Any = [
                random_coded(24, 64, form.weight_bits, form.group_size, form.has_minimum, 1) for form in stored if form
            ]
        else:
            pieces = random_rows(48, 64, "bfloat16", 1)
        packed = pack_linear(pieces, None, packing_format(stored, wanted))
        assert form_of(packed) == packed_form(stored, wanted), stored


def test_an_embedding_is_never_quantized_anew() -> None:
    assert {table_format(None, head) for head in ALL_FORMATS} == {"none"}
    found = {form: [table_format(form, head) for head in FORMATS] for form in (Q4_1, Q8_0)}
    assert found[Q4_1] == list(FORMATS)
    assert found[Q8_0] == ["none", "wint8", GGUF, GGUF, "w8a8", GGUF, GGUF]


class Definitions:
    """What the tensors of a file are by the definitions of their types, by the names of a checkpoint."""

    def __init__(self, path: Path) -> None:
        self._file = file = GGUFFile.open(path)
        self._places = tensor_names(make_config_json(file.metadata, file.tensors, ""), file.tensors, "")

    def kind(self, name: str) -> str:
        return self._file.tensors[self._places[name].name].kind.name

    def vector(self, name: str) -> NDArray[np.float32]:
        """Return the elements of a vector, which is stored as float32."""
        tensor = self._file.tensors[self._places[name].name]
        assert tensor.kind.name == "F32" and len(tensor.shape) == 1
        return stored_rows(tensor).view("<f4").reshape(-1)

    def plain(self, name: str) -> NDArray[np.float32]:
        """Return the values of a matrix of a type that is not quantized."""
        tensor = self._file.tensors[self._places[name].name]
        assert self._places[name].heads is None
        rows = stored_rows(tensor)
        if tensor.kind.name == "BF16":
            return (rows.view("<u2").astype(np.uint32) << 16).view(np.float32)
        return rows.view({"F16": "<f2", "F32": "<f4"}[tensor.kind.name]).astype(np.float32)

    def __call__(self, name: str) -> Decoded:
        """Return the codes, scales and minimums of a matrix, [rows, ...], in the order of a checkpoint's rows."""
        place = self._places[name]
        tensor = self._file.tensors[place.name]
        rows = stored_rows(tensor)
        if place.expert is not None:
            rows = rows.reshape(tensor.shape[0], -1, tensor.row_bytes)[place.expert]
        if place.heads is not None:
            rows = rows.reshape(place.heads, -1, 2, tensor.row_bytes).swapaxes(1, 2).reshape(rows.shape)
        found = decode(tensor.kind.name, np.ascontiguousarray(rows).reshape(-1, tensor.kind.block_bytes))
        codes, scales, minimums = (
            None if part is None else part.reshape(len(rows), -1)
            for part in (found.codes, found.scales, found.minimums)
        )
        assert codes is not None and scales is not None
        return Decoded(codes, scales, minimums)


def one_hot_outputs(w: PackedLinear) -> NDArray[np.float32]:
    """Return the weights [n, k] as the kernel multiplies them by rows of a single 1."""
    out = paddle.zeros([w.in_features, w.out_features])
    linear(paddle.eye(w.in_features).astype("bfloat16"), w, out, w.in_features)
    return np.asarray(out.numpy().T)


def is_kept(kinds: Sequence[str], wanted: str) -> bool:
    """Return whether a layer of weights of these types keeps the codes that the types define."""
    if any(kind in PLAIN_TYPES or fidelity(kind) == "converted" for kind in kinds):
        return False
    return not wanted.startswith(("wint4", "w4a8")) or all(code_bits(kind) == 4 for kind in kinds)


@pytest.mark.parametrize("wanted", ["", "wint8", "w8a8", "wint4", "w4a8_min"])
@pytest.mark.parametrize("name", QUANTIZED)
def test_every_code_that_is_kept_is_given_back_by_what_is_packed(name: str, wanted: str) -> None:
    config, defined, num_kept = config_of(gguf_path(name)), Definitions(gguf_path(name)), 0
    for names, packed in all_layers(weights_of(config, wanted), config):
        if not is_kept(list(map(defined.kind, names)), wanted):
            continue
        form, found = form_of(packed), list(map(defined, names))
        assert form is not None
        offset = (8 if form.weight_bits == 4 else 128) if form.has_minimum else 0
        codes = [one.codes.astype(int) + (offset if one.minimums is None else 0) for one in found]
        np.testing.assert_array_equal(stored_codes(packed), np.concatenate(codes), f"{names} in {form}")
        num_kept += 1
        if form.row_bits == 16 and not packed.is_gated and packed.bias is None:
            values = np.concatenate([one.values() for one in found])
            largest = np.abs(values).max() * (1 + offset)  # the minimum of a weight that has none is code * scale
            assert np.abs(one_hot_outputs(packed) - values).max() <= 2.0**-11 * largest
    assert num_kept or wanted.startswith(("wint4", "w4a8"))


def all_layers(weights: DecoderWeights, config: ModelConfig) -> Iterator[Packed]:
    """Yield the packed layers of the blocks, the embedding if it is packed, and a head of its own."""
    yield from packed_layers(weights, config)
    if isinstance(weights.embedding, PackedLinear):
        yield ["model.embed_tokens.weight"], weights.embedding
    if not config.tie_word_embeddings:
        yield ["lm_head.weight"], weights.head


@pytest.mark.parametrize("wanted", ["", "w8a8"])
@pytest.mark.parametrize("kinds", [("Q4_0", "Q5_0", "Q8_0"), ("Q4_1", "Q5_1", "Q5_1"), ("Q5_1", "Q4_0", "Q8_0")])
def test_a_fused_layer_of_unlike_types_computes_what_each_weight_does_alone(
    kinds: tuple[str, str, str], wanted: str, tmp_path: Path
) -> None:
    of_part = dict(zip(("attn_q", "attn_k", "attn_v"), kinds))
    path = rewrite(
        gguf_path("llama_f32"), tmp_path / "unlike.gguf", lambda name: of_part.get(name.split(".")[-2], "Q8_0")
    )
    config = config_of(path)
    source, (names, fused) = source_of(config), next(packed_layers(weights_of(config, wanted), config))
    assert [source.kind(name) for name in names] == list(kinds)
    rows = random_rows(5, config.hidden_size, "bfloat16", 3)

    def outputs(weight: PackedLinear) -> NDArray[np.float32]:
        out = paddle.zeros([5, weight.out_features])
        linear(rows, weight, out, 5)
        return np.asarray(out.numpy())

    each = []
    for name in names:
        format = packing_format([source.form(name)], wanted or GGUF)
        each.append(outputs(pack_linear([source.coded(name)], None, format)))
    expected, found = np.concatenate(each, axis=1), outputs(fused)
    if len({"_1" in kind for kind in kinds}) == 1 and library.isa() != "portable":
        np.testing.assert_array_equal(found, expected)
    assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize(
    ("name", "quantization", "is_shared", "table", "head"),
    [
        ("qwen2_q8_0", "", True, Q8_0, Q8_0),
        ("qwen2_q8_0", "w8a8", True, QuantizedForm("w8a8", 32), QuantizedForm("w8a8", 32)),
        ("qwen2_q8_0", "wint4", True, Q8_0, Q8_0),  # a head has eight bits
        ("qwen2_q8_0", {"head": "wint4"}, False, Q8_0, FORMS["wint4"]),
        ("qwen2_q8_0", {"attention": "wint8"}, True, None, None),
        ("qwen2_q8_0", "none", True, None, None),
        ("qwen2_k", {"head": "w4a8"}, True, QuantizedForm("w4a8", 32, True), QuantizedForm("w4a8", 32, True)),
        ("llama_f32", "wint8", False, None, FORMS["wint8"]),
        ("llama_f32", "", True, None, None),
        ("llama_groups", "", False, Q8_0, Q4_0),
        ("llama_groups", {"head": "wint4"}, False, Q8_0, Q4_0),
        ("llama_groups", "none", False, None, None),
    ],
)
def test_a_tied_table_is_one_object_unless_the_head_has_another_form(
    name: str, quantization: str | dict[str, str], is_shared: bool, table: Form, head: Form
) -> None:
    config = config_of(gguf_path(name))
    weights = weights_of(config, quantization)
    assert form_of(weights.head) == head
    assert (form_of(weights.embedding) if isinstance(weights.embedding, PackedLinear) else None) == table
    assert (weights.embedding is weights.head) == is_shared


@pytest.mark.parametrize(("wanted", "dtype"), [("none", "bfloat16"), ("", "float32"), ("none", "float32")])
@pytest.mark.parametrize("name", ["llama_k", "ernie4_5_moe_groups"])
def test_without_codes_every_weight_is_widened_and_rounded_once(name: str, wanted: str, dtype: str) -> None:
    config, defined = config_of(gguf_path(name), dtype=dtype), Definitions(gguf_path(name))
    weights = weights_of(config, wanted)
    layers = list(all_layers(weights, config))
    assert {form_of(packed) for _, packed in (*layers, ([], weights.head))} == {None}
    for names, packed in layers:
        values = [widened(defined, stored) for stored in names]
        exact = pack_linear(paddle.to_tensor(np.concatenate(values)).astype(dtype), None, is_gated=packed.is_gated)
        assert bool((packed.data == exact.data).all()), names


def widened(defined: Definitions, name: str) -> NDArray[np.float32]:
    return defined.plain(name) if defined.kind(name) in PLAIN_TYPES else defined(name).values()


def test_codes_need_bfloat16() -> None:
    for wanted in (GGUF, "w8a8", "wint4"):
        with pytest.raises(ConfigError, match="needs dtype bfloat16, got float32") as caught:
            weights_of(config_of(gguf_path("llama_k"), dtype="float32"), wanted)
        assert caught.value.field == "quantization"


def test_a_checkpoint_without_codes_cannot_keep_them() -> None:
    for config in (config_of(gguf_path("llama_f32")), ModelConfig.from_pretrained(GOLDEN / "qwen3")):
        with pytest.raises(ConfigError, match=r"gguf: .* has no weights that are quantized so") as caught:
            config.weight_formats(QuantizationConfig.from_value(GGUF))
        assert caught.value.field == "quantization"
