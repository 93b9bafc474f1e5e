# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of compressed-tensors are read with their own codes, and compute what transformers does."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from numpy.typing import NDArray

from fastdeploy.config.quantization import UNQUANTIZED
from fastdeploy.models.loader import load_model
from fastdeploy.models.packing import pack_checkpoint
from fastdeploy.models.weight_report import summarize, weight_fates
from fastdeploy.ops.coded_piece import decode
from fastdeploy.ops.linear import PackedLinear, pack_linear
from fastdeploy.ops.quantized_form import QuantizedForm, form_of
from tests.models.compressed_tensors_files import (
    FOLDER,
    NAMES,
    Defined,
    StoredTensor,
    Tensors,
    coded_modules,
    config_of,
    copy_of,
    define,
    read_tensors,
    source_of,
    weights_of,
)
from tests.models.gguf_weights import packed_layers
from tests.models.model_driver import MAX_MODEL_LEN, MAX_ROWS, Driver, log_softmax
from tests.models.test_row_independence import assert_same_bits
from tests.ops.quantized import stored_codes

DOWN, Q = "model.layers.0.mlp.down_proj", "model.layers.0.self_attn.q_proj"


def reference(name: str) -> dict[str, NDArray[Any]]:
    with np.load(FOLDER / name / "reference.npz") as values:
        return dict(values)


def logprobs_of(name: str, dtype: str) -> NDArray[np.float32]:
    config, expected = config_of(FOLDER / name, dtype=dtype), reference(name)
    formats = config.weight_formats(UNQUANTIZED)
    assert formats.is_none == (dtype == "float32")
    model = load_model(config, max_rows=MAX_ROWS, max_model_len=MAX_MODEL_LEN, quantization=formats)
    return log_softmax(Driver(model).run_alone(expected["tokens"]))[expected["rows"]]


@pytest.mark.parametrize("name", NAMES)
def test_logprobs_are_those_of_transformers_with_the_weights_that_the_package_decompresses(name: str) -> None:
    assert np.abs(logprobs_of(name, "float32") - reference(name)["logprobs"]).max() <= 1e-4


@pytest.mark.parametrize("name", NAMES)
def test_kept_codes_compute_nearly_the_same_in_bfloat16(name: str) -> None:
    differences = np.abs(logprobs_of(name, "bfloat16") - reference(name)["logprobs"])
    assert differences.max() <= 0.1 and differences.mean() <= 0.02


def definitions(folder: Path) -> Iterator[tuple[Any, str, Defined]]:
    """Yield the source of a checkpoint with each module that has codes and what these are."""
    source, tensors = source_of(folder), read_tensors(folder)
    for module in coded_modules(tensors):
        bits = int(source.kind(f"{module}.weight").removeprefix("int"))
        yield source, f"{module}.weight", define(tensors, module, bits)


@pytest.mark.parametrize("name", NAMES)
def test_widened_weights_are_bit_for_bit_those_of_the_package(name: str) -> None:
    exact, rounded = blake2b(digest_size=16), source_of(FOLDER / name)
    for source, weight, defined in definitions(FOLDER / name):
        values = source.pieces(weight, "float32")[0].matrix.numpy()
        exact.update(values.tobytes())
        np.testing.assert_array_equal(values, defined.values(), weight)
        found = rounded.read(weight)
        assert found.dtype == paddle.bfloat16
        assert bool((found == paddle.to_tensor(values).astype("bfloat16")).all()), weight
    assert exact.digest() == reference(name)["digest"].tobytes()


def all_layers(folder: Path, quantization: str = "") -> Iterator[tuple[list[str], PackedLinear]]:
    """Yield the packed layers of a checkpoint, with embedding and head if they are packed."""
    config, weights = weights_of(folder, quantization)
    yield from packed_layers(weights, config)
    if isinstance(weights.embedding, PackedLinear):
        yield ["model.embed_tokens.weight"], weights.embedding
    if not config.tie_word_embeddings:
        yield ["lm_head.weight"], weights.head


@pytest.mark.parametrize("wanted", ["", "wint8", "w8a8", "w4a8"])
@pytest.mark.parametrize("name", NAMES)
def test_every_code_that_is_kept_is_given_back_by_what_is_packed(name: str, wanted: str) -> None:
    source, defined = source_of(FOLDER / name), {weight: one for _, weight, one in definitions(FOLDER / name)}
    num_kept = 0
    for names, packed in all_layers(FOLDER / name, wanted):
        form, own = form_of(packed), [source.form(weight) for weight in names]
        if form is None or None in own or form.weight_bits < max(one.weight_bits for one in own):
            continue  # some are plain, or they are quantized anew
        ends = np.cumsum([len(defined[weight].codes) for weight in names])
        offset = (8 if form.weight_bits == 4 else 128) if form.has_minimum else 0
        for weight, of_weight, rows in zip(names, own, np.split(stored_codes(packed), ends[:-1]), strict=True):
            if source.fidelity(weight) == "converted":
                continue
            own_offset = 8 if source.kind(weight) == "int4" else 128
            added = own_offset if of_weight.has_minimum else offset
            np.testing.assert_array_equal(rows, defined[weight].codes + added, weight)
            num_kept += 1
    assert num_kept or (name, wanted) == ("llama_w8a8", "w4a8")


@pytest.mark.parametrize("name", NAMES)
def test_what_is_said_to_be_kept_rounded_or_converted_is(name: str) -> None:
    seen, num_changed = set(), 0
    for source, weight, defined in definitions(FOLDER / name):
        values, found, said = defined.values(), decode(source.coded(weight)).numpy(), source.fidelity(weight)
        difference = np.abs(found - values)
        largest = np.abs(defined.scales[:, defined.groups])
        seen.add(said)
        if said == "kept":
            np.testing.assert_array_equal(found, values, weight)
        elif said == "rounded":
            assert (difference <= 2.0**-11 * largest * 2 ** int(source.kind(weight).removeprefix("int"))).all(), weight
            num_changed += int(difference.max() > 0)
        else:
            assert said == "converted" and 0 < difference.max() <= 0.01 * np.abs(values).max(), weight
    assert (
        seen
        == {
            "llama_mixed": {"kept", "rounded", "converted"},
            "llama_w4a8": {"kept", "rounded"},
            "llama_w8a8": {"kept"},
            "qwen2_asymmetric": {"rounded"},
            "qwen3_float32_scales": {"kept", "rounded"},
            "qwen3_moe": {"kept"},
        }[name]
    )


@pytest.mark.parametrize(("begin", "end"), [(0, 1), (3, 20), (8, 16), (13, 64)])
@pytest.mark.parametrize("name", NAMES)
def test_any_range_of_outputs_may_be_read(name: str, begin: int, end: int) -> None:
    for source, weight, _ in definitions(FOLDER / name):
        stored = source.coded(weight)
        whole, part = decode(stored).numpy(), decode(stored.outputs(begin, min(end, stored.num_outputs))).numpy()
        np.testing.assert_array_equal(part, whole[begin:end], weight)


@pytest.mark.parametrize(
    ("name", "forms"),
    [
        ("llama_mixed", {Q: QuantizedForm("wint4", 128), DOWN: QuantizedForm("w8a8", 0)}),
        ("llama_w4a8", {Q: QuantizedForm("w4a8", 32, True), DOWN: QuantizedForm("w8a8", 128)}),
        ("llama_w8a8", {Q: QuantizedForm("w8a8", 0)}),
        ("qwen2_asymmetric", {Q: QuantizedForm("wint4", 32, True), DOWN: QuantizedForm("wint4", 32, True)}),
        ("qwen3_float32_scales", {Q: QuantizedForm("wint4", 0), DOWN: QuantizedForm("wint4", 64)}),
        ("qwen3_float32_scales", {"model.layers.0.self_attn.k_proj": QuantizedForm("wint4", 0, True)}),
        ("qwen3_moe", {Q: QuantizedForm("wint8", 0, True), DOWN: QuantizedForm("wint4", 32)}),
        ("qwen3_moe", {"model.layers.1.mlp.experts.3.up_proj": QuantizedForm("wint4", 32)}),
        ("qwen3_moe", {"model.layers.1.mlp.gate": None}),
    ],
)
def test_a_weight_has_the_form_that_config_json_gives_its_module(name: str, forms: dict[str, Any]) -> None:
    source = source_of(FOLDER / name)
    assert {module: source.form(f"{module}.weight") for module in forms} == forms


@pytest.mark.parametrize("name", NAMES)
def test_layers_have_the_forms_that_are_told_before(name: str) -> None:
    config = config_of(FOLDER / name)
    told = {fate.name: fate.form for fate in weight_fates(config, config.weight_formats(UNQUANTIZED))}
    found = {weight: form_of(packed) for names, packed in all_layers(FOLDER / name) for weight in names}
    assert {weight: told[weight] for weight in found} == found
    assert summarize(weight_fates(config, config.weight_formats(UNQUANTIZED)))


def test_static_scales_of_inputs_and_of_caches_are_not_read(tmp_path: Path) -> None:
    def change(tensors: Tensors, config: dict[str, Any]) -> None:
        for place in (
            "self_attn.k_scale",
            "self_attn.v_scale",
            "self_attn.q_proj.output_scale",
            "mlp.up_proj.input_zero_point",
        ):
            tensors[f"model.layers.0.{place}"] = StoredTensor("F32", np.ones(1, np.float32))
        config["kv_cache_scheme"] = {"num_bits": 8, "type": "float"}

    folder = copy_of("llama_w4a8", tmp_path, change)
    config, weights = weights_of(folder)
    assert [note for note in config.notes if "kv_cache_scheme has no effect" in note]
    assert weights.forms == weights_of(FOLDER / "llama_w4a8")[1].forms


def with_order(order: NDArray[Any], folder: Path, kind: str = "I32") -> Path:
    """Write a checkpoint whose q_proj, of 128 inputs in groups of 16, has groups in this order."""

    def change(tensors: Tensors, config: dict[str, Any]) -> None:
        module = "model.layers.1.mlp.up_proj"
        tensors[f"{module}.weight_g_idx"] = StoredTensor(kind, order.astype(np.int32 if kind == "I32" else np.int64))

    return copy_of("llama_mixed", folder, change)


SIXTEENS = np.arange(128) // 16


@pytest.mark.parametrize(
    ("order", "form"),
    [
        (SIXTEENS, QuantizedForm("wint8", 32)),
        (np.full(128, -1), QuantizedForm("wint8", 32)),
        (np.random.default_rng(1).permutation(SIXTEENS), QuantizedForm("wint8", 32)),
        (np.repeat([5, 2, 7, 0], 32), QuantizedForm("wint4", 32)),
        (np.repeat([3, 1], 64), QuantizedForm("wint4", 64)),
        (np.full(128, 6), QuantizedForm("wint4", 128)),
    ],
)
@pytest.mark.parametrize("kind", ["I32", "I64"])
def test_codes_are_kept_if_each_32_inputs_are_of_one_group_and_converted_if_not(
    order: NDArray[Any], form: QuantizedForm, kind: str, tmp_path: Path
) -> None:
    folder, weight = with_order(order, tmp_path, kind), "model.layers.1.mlp.up_proj.weight"
    found = {name: (source, defined) for source, name, defined in definitions(folder)}
    source, defined = found[weight]
    assert source.form(weight) == form
    values, coded = defined.values(), decode(source.coded(weight)).numpy()
    np.testing.assert_array_equal(source.pieces(weight, "float32")[0].matrix.numpy(), values)
    if form.weight_bits == 4:
        assert source.fidelity(weight) == "kept"
        np.testing.assert_array_equal(coded, values)
    else:
        assert source.fidelity(weight) == "converted"
        largest = np.abs(values).reshape(len(values), -1, 32).max(-1).repeat(32, axis=1)
        assert (np.abs(coded - values) <= 1.001 * largest / 254).all()


@pytest.mark.parametrize(("ratio", "said"), [(2.0**-16, "kept"), (2.0**-20, "rounded")])
def test_bfloat16_scales_are_kept_unless_those_of_an_output_are_very_unlike(
    ratio: float, said: str, tmp_path: Path
) -> None:
    weight = "model.layers.1.mlp.experts.3.up_proj"

    def change(tensors: Tensors, config: dict[str, Any]) -> None:
        scales = tensors[f"{weight}.weight_scale"].values
        scales[:] = (np.float32(1.9921875).view(np.uint32) >> 16).astype(np.uint16)
        scales[3, 1] = (np.float32(1.9921875 * ratio).view(np.uint32) >> 16).astype(np.uint16)

    folder = copy_of("qwen3_moe", tmp_path, change)
    source, defined = next((s, d) for s, name, d in definitions(folder) if name == f"{weight}.weight")
    assert source.fidelity(f"{weight}.weight") == said
    is_equal = np.array_equal(decode(source.coded(f"{weight}.weight")).numpy(), defined.values())
    assert is_equal == (said == "kept")


@pytest.mark.parametrize("symmetric", [True, False])
def test_large_float16_scales_are_packed_beside_minimums(symmetric: bool, tmp_path: Path) -> None:
    def change(tensors: Tensors, config: dict[str, Any]) -> None:
        for name, tensor in tensors.items():
            if name.startswith("model.layers.0.self_attn.q_proj.weight_scale"):
                tensor.values[:] = 60000.0
        if symmetric:
            del tensors["model.layers.0.self_attn.q_proj.weight_zero_point"]
            scheme = dict(config["config_groups"]["group_0"])
            scheme["weights"] = {**scheme["weights"], "symmetric": True}
            config["config_groups"]["group_1"] = {**scheme, "targets": ["model.layers.0.self_attn.q_proj"]}

    folder = copy_of("qwen2_asymmetric", tmp_path, change)
    names, packed = next(all_layers(folder))
    assert form_of(packed) == QuantizedForm("wint4", 32, True)
    source = source_of(folder)
    packed_alone = pack_linear([source.coded(names[0])], None, "wint8")
    assert packed_alone.num_bytes


@pytest.mark.parametrize("name", ["llama_mixed", "llama_w8a8", "qwen3_moe", "llama_w4a8"])
def test_a_packed_folder_has_the_bits_of_the_checkpoint(name: str, tmp_path: Path) -> None:
    pack_checkpoint(config_of(FOLDER / name), tmp_path / "packed", UNQUANTIZED)
    sizes, tokens = {"max_rows": MAX_ROWS, "max_model_len": MAX_MODEL_LEN}, reference(name)["tokens"]
    plain, packed = (load_model(config_of(folder), **sizes) for folder in (FOLDER / name, tmp_path / "packed"))
    assert_same_bits(Driver(packed).run_alone(tokens), Driver(plain).run_alone(tokens))
    assert packed.num_weight_bytes == plain.num_weight_bytes and packed.forms == plain.forms
