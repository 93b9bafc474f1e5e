# SPDX-License-Identifier: Apache-2.0
"""AWQ and GPTQ checkpoints are read with their own codes, and compute what transformers does."""

from __future__ import annotations

from collections.abc import Iterator
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
from fastdeploy.ops.linear import PackedLinear
from fastdeploy.ops.quantized_form import QuantizedForm, form_of
from tests.models.awq_gptq_files import (
    AWQ_ORDER,
    FOLDER,
    NAMES,
    Defined,
    coded_modules,
    copy_of,
    define,
    packed,
    quantization_of,
)
from tests.models.compressed_tensors_files import StoredTensor, Tensors, config_of, read_tensors, source_of, weights_of
from tests.models.gguf_weights import packed_layers
from tests.models.model_driver import MAX_MODEL_LEN, MAX_ROWS, Driver, log_softmax
from tests.models.test_row_independence import assert_same_bits
from tests.ops.quantized import stored_codes

DOWN, Q = "model.layers.0.mlp.down_proj", "model.layers.0.self_attn.q_proj"
ROUNDED = ("awq_64", "awq_32_bias", "awq_experts", "gptq_64_bias", "gptq_int8_32_head")  # have minimums of groups
CONVERTED = [name for name in NAMES if "reordered" in name]


def reference(name: str) -> dict[str, NDArray[Any]]:
    with np.load(FOLDER / name / "reference.npz") as values:
        return dict(values)


def logprobs_of(folder: Path, dtype: str = "float32") -> NDArray[np.float32]:
    config, expected = config_of(folder, dtype=dtype), reference(folder.name)
    formats = config.weight_formats(UNQUANTIZED)
    assert formats.is_none == (dtype == "float32")
    model = load_model(config, max_rows=MAX_ROWS, max_model_len=MAX_MODEL_LEN, quantization=formats)
    return log_softmax(Driver(model).run_alone(expected["tokens"]))[expected["rows"]]


@pytest.mark.parametrize("name", NAMES)
def test_logprobs_are_those_of_transformers_with_the_dequantized_weights(name: str) -> None:
    assert np.abs(logprobs_of(FOLDER / name) - reference(name)["logprobs"]).max() <= 1e-4


@pytest.mark.parametrize("name", NAMES)
def test_kept_rounded_and_converted_codes_compute_nearly_the_same_in_bfloat16(name: str) -> None:
    differences = np.abs(logprobs_of(FOLDER / name, "bfloat16") - reference(name)["logprobs"])
    assert differences.max() <= 0.15 and differences.mean() <= 0.02


def definitions(folder: Path) -> Iterator[tuple[str, Defined]]:
    """Yield the name of each weight with codes, and what these are."""
    tensors, quantization = read_tensors(folder), quantization_of(folder)
    for module in coded_modules(tensors):
        yield f"{module}.weight", define(tensors, module, quantization)


@pytest.mark.parametrize("name", NAMES)
def test_widened_weights_are_the_products_of_the_definition(name: str) -> None:
    source = source_of(FOLDER / name)
    for weight, defined in definitions(FOLDER / name):
        values = source.pieces(weight, "float32")[0].matrix
        np.testing.assert_array_equal(values.numpy(), defined.values(), weight)
        assert bool((source.read(weight) == values.astype("bfloat16")).all()), weight


def all_layers(folder: Path, quantization: str) -> Iterator[tuple[list[str], PackedLinear]]:
    """Yield the packed layers of a checkpoint, with the head if it is packed."""
    config, weights = weights_of(folder, quantization)
    yield from packed_layers(weights, config)
    if not config.tie_word_embeddings:
        yield ["lm_head.weight"], weights.head


@pytest.mark.parametrize("wanted", ["", "wint8", "w8a8", "w4a8"])
@pytest.mark.parametrize("name", [name for name in NAMES if name not in CONVERTED])
def test_every_code_that_is_kept_is_given_back_by_what_is_packed(name: str, wanted: str) -> None:
    defined, num_kept = dict(definitions(FOLDER / name)), 0
    for names, layer in all_layers(FOLDER / name, wanted):
        form, own = form_of(layer), [defined.get(weight) for weight in names]
        if form is None or None in own or form.weight_bits < max(one.bits for one in own if one):
            continue  # some are plain, or they are quantized anew
        rows = np.split(stored_codes(layer), np.cumsum([len(one.codes) for one in own if one])[:-1])
        for one, found in zip(own, rows, strict=True):
            assert one is not None
            own_offset = 2 ** (one.bits - 1) if one.is_symmetric else 0
            offset = 2 ** (form.weight_bits - 1) if one.is_symmetric and form.has_minimum else 0
            # Codes are given back from 0 on if there are minimums, else from their lowest one on.
            np.testing.assert_array_equal(found, one.codes - own_offset + offset)
            num_kept += 1
    assert num_kept or (wanted == "w4a8" and "int8" in name)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_said_to_be_kept_rounded_or_converted_is(name: str) -> None:
    source, seen = source_of(FOLDER / name), set[str]()
    for weight, defined in definitions(FOLDER / name):
        values, found, said = defined.values(), decode(source.coded(weight)).numpy(), source.fidelity(weight)
        difference, largest = np.abs(found - values), defined.scales[:, defined.groups] * 2**defined.bits
        seen.add(said)
        if said == "kept":
            np.testing.assert_allclose(found, values, rtol=0, atol=2.0**-23 * largest.max(), err_msg=weight)
        elif said == "rounded":
            assert (difference <= 2.0**-11 * largest).all() and difference.max() > 0, weight
        else:
            assert said == "converted" and 0 < difference.max() <= 0.01 * np.abs(values).max(), weight
    assert seen == {"converted"} if name in CONVERTED else "converted" not in seen
    assert ("rounded" in seen) == (
        name in ("awq_64", "awq_32_bias", "awq_experts", "gptq_64_bias", "gptq_int8_32_head")
    )


@pytest.mark.parametrize(("begin", "end"), [(0, 1), (3, 20), (8, 16), (13, 32)])
@pytest.mark.parametrize("name", NAMES)
def test_any_range_of_outputs_may_be_read(name: str, begin: int, end: int) -> None:
    source = source_of(FOLDER / name)
    for weight, _ in definitions(FOLDER / name):
        stored = source.coded(weight)
        whole, part = decode(stored).numpy(), decode(stored.outputs(begin, end)).numpy()
        np.testing.assert_array_equal(part, whole[begin:end], weight)


@pytest.mark.parametrize(
    ("name", "weight", "form"),
    [
        ("awq_64", DOWN, QuantizedForm("wint4", 64, has_minimum=True)),
        ("awq_64", Q, QuantizedForm("wint4", 0, has_minimum=True)),
        ("awq_128_symmetric", DOWN, QuantizedForm("wint4", 128)),
        ("awq_rows_bf16", DOWN, QuantizedForm("wint4", 0, has_minimum=True)),
        ("gptq_128_short_group", DOWN, QuantizedForm("wint4", 128)),
        ("gptq_int8_32_head", "lm_head", QuantizedForm("wint8", 32, has_minimum=True)),
        ("gptq_int8_rows", DOWN, QuantizedForm("wint8")),
        ("gptq_reordered", DOWN, QuantizedForm("wint8", 32)),
        ("gptq_experts", "model.layers.1.mlp.experts.3.down_proj", QuantizedForm("wint8")),
        ("gptq_experts", "model.layers.1.mlp.experts.3.up_proj", QuantizedForm("wint4", 32)),
    ],
)
def test_codes_have_the_form_of_their_bits_groups_and_zeros(name: str, weight: str, form: QuantizedForm) -> None:
    assert source_of(FOLDER / name).form(f"{weight}.weight") == form


def test_a_start_says_what_is_kept_rounded_and_converted() -> None:
    def said(name: str) -> str:
        config = config_of(FOLDER / name)
        return summarize(weight_fates(config, config.weight_formats(UNQUANTIZED)))

    assert said("awq_64") == (
        "kept: AWQ int4 (0.1 MiB); kept, scales rounded to fp16: AWQ int4 (0.0 MiB); plain: F16 (0.0 MiB)"
    )
    assert said("gptq_reordered") == (
        "converted to eight bits: GPTQ int4 in the order of g_idx (0.0 MiB); plain: F16 (0.0 MiB)"
    )


@pytest.mark.parametrize("name", ["awq_experts", "gptq_experts", "gptq_128_short_group", "gptq_int8_32_head"])
def test_a_packed_folder_computes_the_same_bits(name: str, tmp_path: Path) -> None:
    config, expected = config_of(FOLDER / name), reference(name)
    pack_checkpoint(config, tmp_path / "packed", UNQUANTIZED)
    logits = []
    for each in (config, config_of(tmp_path / "packed")):
        wanted = each.weight_formats(UNQUANTIZED)
        model = load_model(each, max_rows=MAX_ROWS, max_model_len=MAX_MODEL_LEN, quantization=wanted)
        logits.append(Driver(model).run_alone(expected["tokens"]))
    assert_same_bits(*logits)


def test_a_quantized_head_is_used_although_config_json_ties_it(tmp_path: Path) -> None:
    def change(tensors: Tensors, config: dict[str, Any]) -> None:
        config["tie_word_embeddings"] = True

    folder = copy_of("gptq_int8_32_head", tmp_path / "gptq_int8_32_head", change)
    assert np.abs(logprobs_of(folder) - reference("gptq_int8_32_head")["logprobs"]).max() <= 1e-4
    assert any("lm_head.weight is used" in note for note in config_of(folder).notes)


def one_dtype(values: Any, tensors: Tensors, name: str) -> None:
    tensors[name] = StoredTensor(tensors[name].kind, values.astype(tensors[name].values.dtype))


@pytest.mark.parametrize("desc_act", [False, True])
def test_an_order_that_rises_is_kept_whatever_desc_act_says(desc_act: bool, tmp_path: Path) -> None:
    def change(tensors: Tensors, config: dict[str, Any]) -> None:
        config["quantization_config"]["desc_act"] = desc_act

    source = source_of(copy_of("gptq_128_short_group", tmp_path / "gptq_128_short_group", change))
    assert source.form(f"{DOWN}.weight") == QuantizedForm("wint4", 128)


def test_an_order_that_does_not_rise_is_followed_whatever_desc_act_says(tmp_path: Path) -> None:
    def change(tensors: Tensors, config: dict[str, Any]) -> None:
        config["quantization_config"]["desc_act"] = False

    folder = copy_of("gptq_reordered", tmp_path / "gptq_reordered", change)
    assert np.abs(logprobs_of(folder) - reference("gptq_reordered")["logprobs"]).max() <= 1e-4


def test_groups_in_another_order_keep_their_codes(tmp_path: Path) -> None:
    """Only the order of whole groups differs, so that each 32 inputs still share a scale."""

    def change(tensors: Tensors, config: dict[str, Any]) -> None:
        one_dtype(np.repeat([2, 0, 1], 32), tensors, f"{DOWN}.g_idx")

    folder = copy_of("gptq_reordered", tmp_path / "gptq_reordered", change)
    source, defined = source_of(folder), dict(definitions(folder))[f"{DOWN}.weight"]
    assert source.form(f"{DOWN}.weight") == QuantizedForm("wint4", 32, has_minimum=True)
    found = decode(source.coded(f"{DOWN}.weight")).numpy()
    assert np.abs(found - defined.values()).max() <= 2.0**-11 * 16 * defined.scales.max()


@pytest.mark.parametrize("is_missing", [False, True])
def test_a_g_idx_that_nobody_filled_means_groups_in_order(is_missing: bool, tmp_path: Path) -> None:
    def change(tensors: Tensors, config: dict[str, Any]) -> None:
        for name in [name for name in tensors if name.endswith(".g_idx")]:
            one_dtype(np.zeros(tensors[name].values.shape), tensors, name)
            if is_missing:
                del tensors[name]

    folder = copy_of("gptq_128_short_group", tmp_path / "gptq_128_short_group", change)
    assert np.abs(logprobs_of(folder) - reference("gptq_128_short_group")["logprobs"]).max() <= 1e-4


@pytest.mark.parametrize("name", ["gptq_128_short_group", "gptq_int8_rows"])
def test_with_sym_zeros_that_were_not_stored_less_one_are_recognized(name: str, tmp_path: Path) -> None:
    def change(tensors: Tensors, config: dict[str, Any]) -> None:
        for zeros in [name for name in tensors if name.endswith(".qzeros")]:
            half = 0x88888888 if "int8" not in name else 0x80808080
            tensors[zeros].values[:] = np.uint32(half).view(np.int32)

    folder = copy_of(name, tmp_path / name, change)
    assert np.abs(logprobs_of(folder) - reference(name)["logprobs"]).max() <= 1e-4
    assert source_of(folder).form(f"{DOWN}.weight").has_minimum is False


def test_a_zero_of_0_borrows_from_the_next_one_in_the_first_format(tmp_path: Path) -> None:
    zeros = np.array([0, 5, 0, 0, 15, 1, 7, 9])

    def change(tensors: Tensors, config: dict[str, Any]) -> None:
        config["quantization_config"]["sym"] = False
        stored = packed(zeros, 4).view(np.uint32) - np.uint32(0x11111111)
        tensors[f"{Q}.qzeros"].values[:, 0] = stored.view(np.int32)

    source = source_of(copy_of("gptq_128_short_group", tmp_path / "m", change))
    piece = source.coded(f"{Q}.weight").outputs(0, 8)
    np.testing.assert_array_equal(-piece.minimums.numpy()[:, 0], zeros)


@pytest.mark.parametrize(("size", "group"), [(256, 128), (96, 32), (192, 64)])
def test_groups_that_are_multiples_of_an_operators_keep_their_codes(size: int, group: int, tmp_path: Path) -> None:
    def change(tensors: Tensors, config: dict[str, Any]) -> None:
        config["quantization_config"] |= {"group_size": size, "sym": None}
        module = "model.layers.0.mlp.down_proj"
        del tensors[f"{module}.g_idx"]
        num_groups = -(-576 // size)
        generator = np.random.default_rng(1)
        scales = (1 + generator.random((num_groups, 64))).astype(np.float16)
        tensors[f"{module}.scales"] = StoredTensor("F16", scales)
        zeros = packed(generator.integers(0, 16, (num_groups, 64)), 4).view(np.uint32)
        tensors[f"{module}.qzeros"] = StoredTensor("I32", (zeros - np.uint32(0x11111111)).view(np.int32))

    source = source_of(copy_of("gptq_128_short_group", tmp_path / "m", change))
    assert source.form(f"{DOWN}.weight") == QuantizedForm("wint4", group, has_minimum=True)
    found, values = decode(source.coded(f"{DOWN}.weight")).numpy(), source.pieces(f"{DOWN}.weight", "float32")[0].matrix
    assert np.abs(found - values.numpy()).max() <= 2.0**-11 * 16 * 2


def test_groups_that_no_operator_has_get_codes_of_eight_bits(tmp_path: Path) -> None:
    def change(tensors: Tensors, config: dict[str, Any]) -> None:
        config["quantization_config"]["group_size"] = 16
        for name in [name for name in tensors if name.endswith((".qzeros", ".scales"))]:
            one_dtype(np.repeat(tensors[name].values, 2, axis=0), tensors, name)

    folder = copy_of("awq_32_bias", tmp_path / "awq_32_bias", change)
    source = source_of(folder)
    assert source.form(f"{DOWN}.weight") == QuantizedForm("wint8", 32)
    assert (source.kind(f"{DOWN}.weight"), source.fidelity(f"{DOWN}.weight")) == (
        "AWQ int4 in groups of 16",
        "converted",
    )
    assert np.abs(logprobs_of(folder) - reference("awq_32_bias")["logprobs"]).max() <= 1e-4


@pytest.mark.parametrize(("kind", "fidelity"), [("BF16", "kept"), ("F32", "rounded")])
def test_scales_of_other_types_are_kept_where_fp16_has_room_for_them(kind: str, fidelity: str, tmp_path: Path) -> None:
    def change(tensors: Tensors, config: dict[str, Any]) -> None:
        scales = tensors[f"{DOWN}.scales"].floats() * np.float32(1.0 + 2.0**-12) * 2.0**-30
        bits = scales.view(np.uint32) >> 16
        tensors[f"{DOWN}.scales"] = StoredTensor(kind, bits.astype(np.uint16) if kind == "BF16" else scales)

    source = source_of(copy_of("gptq_128_short_group", tmp_path / "m", change))
    values, found = source.pieces(f"{DOWN}.weight", "float32")[0].matrix, decode(source.coded(f"{DOWN}.weight"))
    assert source.fidelity(f"{DOWN}.weight") == fidelity
    assert bool((values == found).all()) == (fidelity == "kept")
    assert bool(paddle.allclose(found, values, rtol=2.0**-11, atol=0.0))


def test_experts_of_unlike_forms_get_the_widest_of_them(tmp_path: Path) -> None:
    """One expert has zeros of 8 only, and so no minimums."""
    module = "model.layers.1.mlp.experts.0.up_proj"

    def change(tensors: Tensors, config: dict[str, Any]) -> None:
        for part in ("gate_proj", "up_proj"):
            zeros = tensors[f"model.layers.1.mlp.experts.0.{part}.qzeros"].values
            zeros[:] = packed(np.full((zeros.shape[0], zeros.shape[1] * 8), 8), 4, AWQ_ORDER)

    folder = copy_of("awq_experts", tmp_path / "m", change)
    source, (config, weights) = source_of(folder), weights_of(folder)
    assert source.form(f"{module}.weight") == QuantizedForm("wint4", 32)
    defined = dict(definitions(folder))
    for names, layer in packed_layers(weights, config):
        if names[-1].endswith("experts.0.up_proj.weight"):
            assert form_of(layer) == QuantizedForm("wint4", 32, has_minimum=True)
            expected = np.concatenate([defined[weight].codes for weight in names])
            np.testing.assert_array_equal(stored_codes(layer), expected)


def test_an_expert_without_codes_lets_all_experts_be_widened(tmp_path: Path) -> None:
    module = "model.layers.1.mlp.experts.2.down_proj"

    def change(tensors: Tensors, config: dict[str, Any]) -> None:
        values = define(tensors, module, config["quantization_config"]).values()
        for part in ("qweight", "qzeros", "scales"):
            del tensors[f"{module}.{part}"]
        tensors[f"{module}.weight"] = StoredTensor("F32", values)

    folder = copy_of("awq_experts", tmp_path / "awq_experts", change)
    assert np.abs(logprobs_of(folder) - reference("awq_experts")["logprobs"]).max() <= 1e-4
    config, weights = weights_of(folder)
    forms = {names[0]: form_of(layer) for names, layer in packed_layers(weights, config)}
    assert forms["model.layers.1.mlp.experts.0.down_proj.weight"] is None
    assert forms["model.layers.1.mlp.experts.0.gate_proj.weight"] == QuantizedForm("wint4", 32, has_minimum=True)
    fates = {fate.name: fate.what for fate in weight_fates(config, config.weight_formats(UNQUANTIZED))}
    assert fates["model.layers.1.mlp.experts.0.down_proj.weight"] == "widened"
