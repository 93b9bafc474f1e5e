# SPDX-License-Identifier: Apache-2.0
"""Latent attention is read from FP8, compressed-tensors, AWQ and GPTQ as from the widened weights.

All codes but those of the up-projection are kept where a format can keep them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from fastdeploy.config.drafting_checkpoint import infer_method_of
from fastdeploy.config.engine_config import EngineConfig
from fastdeploy.config.model_config import ModelConfig
from fastdeploy.config.quantization import UNQUANTIZED
from fastdeploy.core.errors import ConfigError
from fastdeploy.engine.description import weight_notes
from fastdeploy.engine.weight_memory import weight_bytes
from fastdeploy.models import mtp
from fastdeploy.models.decoder import CausalLM
from fastdeploy.models.files import open_files
from fastdeploy.models.latent_part import LatentWeights
from fastdeploy.models.loader import load_model
from fastdeploy.models.mtp import load_mtp_layers, num_mtp_layers
from fastdeploy.models.packing import pack_checkpoint
from fastdeploy.models.weight_report import tabulate, weight_fates
from fastdeploy.models.weight_source import SafetensorsSource
from fastdeploy.ops.head_products import PackedHeads
from fastdeploy.ops.linear import PackedLinear
from fastdeploy.ops.quantized_form import FORMS, QuantizedForm, form_of
from tests.models.compressed_tensors_files import read_tensors, weights_of, write_tensors
from tests.models.fp8_folders import widened
from tests.models.gguf_weights import Formats, formats
from tests.models.latent_codes import METHODS, write_codes, write_plain
from tests.models.latent_forms import TOKENS
from tests.models.model_driver import MAX_MODEL_LEN, MAX_ROWS, Driver, Logits, log_softmax
from tests.models.test_packed_weights import leaves
from tests.models.test_row_independence import assert_same_bits

KEPT = {
    "compressed-tensors": QuantizedForm("wint4", 32),
    "awq": QuantizedForm("wint4", 32, has_minimum=True),
    "gptq": QuantizedForm("wint4", 32, has_minimum=True),
}
WIDENED = ("fp8", "fp8 per output")
ATTENTION = "model.layers.*.self_attn."


@dataclass(frozen=True)
class Folders:
    """The same weights plain, as codes by method, and plain again after they were codes."""

    plain: Path
    coded: dict[str, Path]
    wide: dict[str, Path]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    root = tmp_path_factory.mktemp("codes")
    plain = write_plain(root / "plain")
    coded = {method: write_codes(plain, root / method, method) for method in METHODS}
    return Folders(plain, coded, {method: widened(folder, root / f"{method} wide") for method, folder in coded.items()})


def load(folder: Path, wanted: Formats = "", dtype: str = "bfloat16") -> CausalLM:
    config = ModelConfig.from_pretrained(folder, dtype=dtype)
    return load_model(config, max_rows=MAX_ROWS, max_model_len=MAX_MODEL_LEN, quantization=formats(wanted))


def logits(model: CausalLM) -> Logits:
    return Driver(model).run_alone(TOKENS)


def attention(folder: Path, wanted: Formats = "") -> Iterator[LatentWeights]:
    for layer in weights_of(folder, wanted)[1].layers:
        assert isinstance(layer.attention, LatentWeights)
        yield layer.attention


@pytest.mark.parametrize("method", METHODS)
def test_float32_takes_the_widened_weights_bit_for_bit(method: str, folders: Folders, tmp_path: Path) -> None:
    wide = widened(folders.coded[method], tmp_path / "wide", "float32")
    assert_same_bits(logits(load(folders.coded[method], dtype="float32")), logits(load(wide, dtype="float32")))


@pytest.mark.parametrize("wanted", ["", "wint8", "w4a8_min", {"attention": "wint4", "experts": "w8a8"}], ids=str)
@pytest.mark.parametrize("method", WIDENED)
def test_fp8_has_the_bits_of_the_widened_copy_packed_or_not(
    method: str, wanted: Formats, folders: Folders, tmp_path: Path
) -> None:
    model, copy = load(folders.coded[method], wanted), load(folders.wide[method], wanted)
    assert_same_bits(logits(model), logits(copy))
    assert (model.num_weight_bytes, model.forms) == (copy.num_weight_bytes, copy.forms)
    pack_checkpoint(ModelConfig.from_pretrained(folders.coded[method]), tmp_path / "packed", formats(wanted))
    assert_same_bits(logits(load(tmp_path / "packed")), logits(copy))


@pytest.mark.parametrize("method", WIDENED)
def test_fp8_is_near_the_weights_that_were_rounded_to_it(method: str, folders: Folders) -> None:
    found, expected = (log_softmax(logits(load(folder))) for folder in (folders.coded[method], folders.plain))
    assert 0.001 < np.abs(found - expected).mean() < 0.1


def test_blocks_that_end_within_weights_have_their_own_scales(folders: Folders) -> None:
    tensors, files = read_tensors(folders.coded["fp8"]), open_files(folders.coded["fp8"], "float32")
    for name, blocks in {
        "kv_a_proj_with_mqa": (2, 1),
        "q_b_proj": (2, 2),
        "kv_b_proj": (3, 2),
        "o_proj": (1, 2),
    }.items():
        weight = f"model.layers.1.self_attn.{name}.weight"
        codes, scales = tensors[weight].values, tensors[f"{weight}_scale_inv"].values
        assert scales.shape == blocks and len(np.unique(scales)) == scales.size
        rows, columns = (np.arange(size) // 128 for size in codes.shape)
        np.testing.assert_array_equal(files.read(weight).numpy(), e4m3(codes) * scales[np.ix_(rows, columns)])


def e4m3(codes: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Return the numbers that codes stand for: a sign, four bits of exponent and three of mantissa."""
    exponent, mantissa = (codes >> 3 & 15).astype(np.int32), (codes & 7).astype(np.float32)
    magnitude = np.where(exponent > 0, np.ldexp(8 + mantissa, exponent - 10), np.ldexp(mantissa, -9))
    return np.where(codes > 127, -magnitude, magnitude).astype(np.float32)


@pytest.mark.parametrize("method", KEPT)
def test_kept_codes_compute_nearly_what_the_widened_copy_does(method: str, folders: Folders) -> None:
    found, expected = (log_softmax(logits(load(each[method]))) for each in (folders.coded, folders.wide))
    assert 0 < np.abs(found - expected).max() <= 0.1


@pytest.mark.parametrize("method", KEPT)
def test_the_up_projection_is_widened_and_all_other_codes_are_kept(method: str, folders: Folders) -> None:
    layers = list(zip(attention(folders.coded[method]), attention(folders.wide[method]), strict=True))
    assert len(layers) == 2
    for found, wide in layers:
        assert found.key_up.quantization == found.value_up.quantization == "none"
        assert leaves((found.key_up, found.value_up)) == leaves((wide.key_up, wide.value_up))
        own = KEPT[method]
        assert form_of(found.output) == own
        row_form = own if method == "compressed-tensors" else QuantizedForm("wint4", 0, has_minimum=True)
        assert form_of(found.down) == row_form, "a group is a whole row"
        assert form_of(found.query) is None, "136 inputs are no whole groups, so that the file has it plain"


@pytest.mark.parametrize("wanted", ["wint8", "w8a8", "w4a8_min"])
@pytest.mark.parametrize("method", KEPT)
def test_with_a_format_the_up_projection_is_quantized_anew_from_widened_weights(
    method: str, wanted: str, folders: Folders
) -> None:
    each = (attention(folder[method], {"attention": wanted}) for folder in (folders.coded, folders.wide))
    layers = list(zip(*each, strict=True))
    assert len(layers) == 2
    for found, wide in layers:
        assert form_of(found.key_up) == form_of(found.value_up) == FORMS[wanted]
        assert leaves((found.key_up, found.value_up)) == leaves((wide.key_up, wide.value_up))


@pytest.mark.parametrize("wanted", ["", "w4a8", {"attention": "own", "experts": "w8a8", "head": "wint4"}], ids=str)
@pytest.mark.parametrize("method", KEPT)
def test_packed_codes_have_the_bits_of_the_checkpoint(
    method: str, wanted: Formats, folders: Folders, tmp_path: Path
) -> None:
    if isinstance(wanted, dict):
        wanted = {**wanted, "attention": method}
    config = ModelConfig.from_pretrained(folders.coded[method])
    pack_checkpoint(config, tmp_path / "packed", formats(wanted))
    packed, model = load(tmp_path / "packed"), load(folders.coded[method], wanted)
    assert_same_bits(logits(packed), logits(model))
    assert (packed.num_weight_bytes, packed.forms) == (model.num_weight_bytes, model.forms)


def lines_of(folder: Path, wanted: Formats = "") -> list[str]:
    config = ModelConfig.from_pretrained(folder)
    found = tabulate(weight_fates(config, config.weight_formats(formats(wanted))))
    return [line.removeprefix(ATTENTION) for line in found if line.startswith(ATTENTION)]


def test_the_report_says_what_becomes_of_each_weight(folders: Folders) -> None:
    kept = "kept, 4 bits with a scale per 32 inputs, inputs of 16 bits"
    assert lines_of(folders.coded["compressed-tensors"]) == [
        f"q_a_proj.weight: 2 x int4, {kept}",
        f"kv_a_proj_with_mqa.weight: 2 x int4, {kept}",
        "q_b_proj.weight: 2 x BF16, plain, floating-point numbers",
        "kv_b_proj.weight: 2 x int4, widened, floating-point numbers",
        f"o_proj.weight: 2 x int4, {kept}",
    ]
    assert lines_of(folders.coded["awq"])[3] == "kv_b_proj.weight: 2 x AWQ int4, widened, floating-point numbers"
    anew = "quantized anew, 8 bits with a scale per output, inputs of 16 bits"
    assert lines_of(folders.coded["gptq"], "wint8")[3] == f"kv_b_proj.weight: 2 x GPTQ int4, {anew}"
    assert {line.split(", ")[1] for line in lines_of(folders.coded["fp8"])} == {"widened"}


@pytest.mark.parametrize("wanted", ["", "none", "wint8", "w4a8"])
@pytest.mark.parametrize("method", METHODS)
def test_bytes_are_those_of_the_loaded_weights_without_padding(method: str, wanted: str, folders: Folders) -> None:
    config = ModelConfig.from_pretrained(folders.coded[method])
    counted, loaded = weight_bytes(config, formats(wanted)), load(folders.coded[method], wanted).num_weight_bytes
    parts = list(attention(folders.coded[method], wanted))
    of_attention = sum(part.num_bytes for part in parts)
    padded = sum(padding(layer) for part in parts for layer in (part.down, part.query, part.key_up, part.value_up))
    assert counted["attention"] == of_attention - padded
    assert 0 < loaded - sum(counted.values()) < 0.1 * loaded


def padding(packed: PackedLinear | PackedHeads) -> int:
    """Return the bytes of outputs that fill up the last panel of a matrix."""
    count = packed.num_heads if isinstance(packed, PackedHeads) else 1
    missing = -packed.out_features % 16
    form = form_of(packed)
    per_output = 2 * packed.in_features if form is None else form.panel_bytes(packed.in_features) // 16
    return count * missing * per_output


def test_a_start_says_it_in_one_line(folders: Folders) -> None:
    config = ModelConfig.from_pretrained(folders.coded["compressed-tensors"])
    (note,) = weight_notes(EngineConfig(model="model"), config)
    assert "kept: int4 (" in note and "widened: int4 (" in note and "\n" not in note


@pytest.mark.parametrize("method", METHODS)
def test_no_note_says_that_the_layer_for_drafts_is_not_used(method: str, folders: Folders) -> None:
    assert ModelConfig.from_pretrained(folders.coded[method]).notes == ()
    assert num_mtp_layers(str(folders.coded[method])) == 1


def test_an_up_projection_that_is_plain_beside_codes_stays_plain(folders: Folders, tmp_path: Path) -> None:
    folder = write_codes(folders.plain, tmp_path / "model", "awq", plain="kv_b_proj")
    assert lines_of(folder)[3] == "kv_b_proj.weight: 2 x BF16, plain, floating-point numbers"
    for found, expected in zip(attention(folder), attention(folders.plain), strict=True):
        assert leaves((found.key_up, found.value_up)) == leaves((expected.key_up, expected.value_up))
        assert form_of(found.output) == KEPT["awq"]


@pytest.mark.parametrize("wanted", ["", "wint8"])
@pytest.mark.parametrize("method", METHODS)
def test_the_layer_for_drafts_has_the_attention_of_the_widened_copy(
    method: str, wanted: Formats, folders: Folders, loaded: list[list[mtp.MTPWeights]]
) -> None:
    for folder in (folders.coded[method], folders.wide[method]):
        target = load(folder, wanted)
        own = target.config.weight_formats(formats(wanted)).for_mtp_layers(target.config.dtype)
        load_mtp_layers(target, None, "default_v1", own)
    (found,), (wide,) = loaded
    assert isinstance(found.block.attention, LatentWeights) and isinstance(wide.block.attention, LatentWeights)
    ups = [(layer.block.attention.key_up, layer.block.attention.value_up) for layer in (found, wide)]
    assert leaves(ups[0]) == leaves(ups[1])
    if method in WIDENED:
        assert leaves(found) == leaves(wide)
    elif not wanted:
        assert form_of(found.block.attention.output) == KEPT[method]


@pytest.mark.parametrize("method", METHODS)
def test_a_folder_of_its_own_gives_the_layer_for_drafts_with_its_codes(
    method: str, folders: Folders, tmp_path: Path, loaded: list[list[mtp.MTPWeights]]
) -> None:
    of_layer = {name: tensor for name, tensor in read_tensors(folders.coded[method]).items() if ".layers.2." in name}
    write_tensors(tmp_path, of_layer)
    shutil.copy(folders.coded[method] / "config.json", tmp_path)
    assert infer_method_of(tmp_path) == "mtp"
    target = load(folders.coded[method])
    own = target.config.weight_formats(UNQUANTIZED)
    for path in (str(tmp_path), None):
        load_mtp_layers(target, path, "default_v1", own)
    is_same = leaves(loaded[0][0]) == leaves(loaded[1][0])
    assert is_same


@pytest.mark.parametrize("method", METHODS)
def test_the_pages_of_all_weights_are_given_back(
    method: str, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    released: list[str] = []
    release = SafetensorsSource.release
    monkeypatch.setattr(SafetensorsSource, "release", lambda self, name: (released.append(name), release(self, name)))
    load(folders.coded[method])
    assert sorted(released) == sorted(name for name in read_tensors(folders.coded[method]) if "layers.2." not in name)


def test_scales_for_another_number_of_blocks_are_refused(folders: Folders, tmp_path: Path) -> None:
    folder = write_codes(folders.plain, tmp_path / "model", "fp8")
    tensors, name = read_tensors(folder), "model.layers.1.self_attn.kv_a_proj_with_mqa.weight_scale_inv"
    assert tensors[name].values.shape == (2, 1)
    tensors[name].values = tensors[name].values[:1]
    write_tensors(folder, tensors)
    with pytest.raises(ConfigError, match=rf"{name} is \[1, 1\], expected \[2, 1\], a scale per block of \[128, 128\]"):
        load(folder)


def test_config_json_that_says_fp8_without_blocks_is_refused(folders: Folders, tmp_path: Path) -> None:
    folder = write_codes(folders.plain, tmp_path / "model", "fp8")
    raw = json.loads((folder / "config.json").read_text())
    del raw["quantization_config"]["weight_block_size"]
    (folder / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match="a scale per tensor") as caught:
        load(folder)
    assert caught.value.field == "quantization_config"
