# SPDX-License-Identifier: Apache-2.0
"""Weights that were packed into files give the bits of weights that are packed at the start, or are refused."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from paddle import Tensor
from safetensors.paddle import load_file, save_file

from fastdeploy.config.engine_config import EngineConfig
from fastdeploy.config.model_config import ModelConfig
from fastdeploy.config.packed_checkpoint import DATA_FILE, HEADER_FILE, PackedHeader, read_packed_header
from fastdeploy.config.quantization import UNQUANTIZED, QuantizationConfig
from fastdeploy.core.errors import ConfigError
from fastdeploy.engine.description import make_fingerprint
from fastdeploy.models import mtp
from fastdeploy.models.decoder import CausalLM
from fastdeploy.models.loader import load_model
from fastdeploy.models.mtp_forms import ernie_form
from fastdeploy.models.packed_store import PackedWriter
from fastdeploy.models.packing import pack_checkpoint
from fastdeploy.models.registry import find_architecture
from fastdeploy.models.weight_source import DummySource
from fastdeploy.ops.backends.cpu.backend import BACKEND
from fastdeploy.ops.backends.gpu.backend import GpuBackend
from tests.models.model_driver import GOLDEN, MAX_MODEL_LEN, MAX_ROWS, Driver, load_golden
from tests.models.mtp_training import DEMO, DefinedLayer, write_checkpoint
from tests.models.test_row_independence import assert_same_bits, tokens_of

EIGHT_BITS = QuantizationConfig.from_value("wint8")


def pack(
    source: Path, folder: Path, quantization: str | dict[str, str] = "wint8", dtype: str = "bfloat16"
) -> PackedHeader:
    formats = QuantizationConfig.from_value(quantization)
    return pack_checkpoint(ModelConfig.from_pretrained(source, dtype=dtype), folder, formats)


def load(folder: Path, quantization: QuantizationConfig = UNQUANTIZED, **options: Any) -> CausalLM:
    config = ModelConfig.from_pretrained(folder, **options)
    return load_model(config, max_rows=MAX_ROWS, max_model_len=MAX_MODEL_LEN, quantization=quantization)


def leaves(value: Any) -> list[Any]:
    """Return the tensors, as bytes, and the other values that an object of a model holds."""
    if isinstance(value, Tensor):
        return [str(value.dtype), value.astype("float32").numpy().tobytes()]
    if isinstance(value, tuple):
        return [leaf for item in value for leaf in leaves(item)]
    if dataclasses.is_dataclass(value):
        return [leaf for field in dataclasses.fields(value) for leaf in leaves(getattr(value, field.name))]
    return [value]


@pytest.mark.parametrize(
    ("name", "quantization", "dtype"),
    [
        ("ernie4_5", "none", "bfloat16"),
        ("qwen2", "none", "float32"),
        ("llama_untied_bias", "w4a8", "bfloat16"),
        ("paddlenlp_qwen2_fused", "wint8", "bfloat16"),
        ("qwen3", "wint4", "bfloat16"),
        ("qwen3_moe", "none", "float32"),
        ("glm4_moe", "w8a8", "bfloat16"),
        ("glm4_moe_air", "none", "bfloat16"),
        ("ernie4_5_moe", "wint4", "bfloat16"),
        ("ernie4_5_moe_paddle", "w4a8", "bfloat16"),
        ("ernie4_5_moe", "wint4", "bfloat16"),
        ("ernie4_5_moe_paddle", "none", "float32"),
        ("qwen3_moe", "w8a8", "bfloat16"),
        ("glm4_moe_air", "none", "bfloat16"),
    ],
)
def test_a_packed_model_has_the_bits_of_one_packed_at_the_start(
    tmp_path: Path, name: str, quantization: str, dtype: str
) -> None:
    header = pack(GOLDEN / name, tmp_path / "packed", quantization, dtype)
    assert all(tensor.offset % 64 == 0 for entry in header.entries.values() for tensor in entry.tensors.values())
    packed, plain = load(tmp_path / "packed"), load_golden(name, dtype, quantization)  # type: ignore[arg-type]
    assert_same_bits(Driver(packed).run_alone(tokens_of(3)), Driver(plain).run_alone(tokens_of(3)))
    assert packed.num_weight_bytes == plain.num_weight_bytes


@pytest.mark.parametrize(
    ("quantization", "expected"),
    [
        ("wint4", {"attention": "wint8", "mlp": "wint8", "experts": "wint4", "head": "wint8"}),
        (dict.fromkeys(("attention", "mlp", "experts", "head"), "w4a8"), None),
        ({"experts": "wint8"}, {"attention": "none", "mlp": "none", "experts": "wint8", "head": "none"}),
    ],
)
def test_each_part_of_a_model_with_experts_has_its_format_and_gates_have_none(
    tmp_path: Path, quantization: str | dict[str, str], expected: dict[str, str] | None
) -> None:
    header = pack(GOLDEN / "ernie4_5_moe", tmp_path / "packed", quantization)
    parts = {
        "attention": r"self_attn\.",
        "mlp": r"(shared_experts\.|mlp\.)(gate_proj|down_proj)",
        "experts": r"mlp\.experts\.",
        "head": "head",
    }
    found = {
        part: {
            entry.fields["quantization"]
            for name, entry in header.entries.items()
            if re.search(pattern, name) and entry.kind != "Tensor"
        }
        for part, pattern in parts.items()
    }
    assert found == {part: {format} for part, format in (expected or quantization).items()}  # type: ignore[union-attr]
    plain = [name for name, entry in header.entries.items() if entry.kind == "Tensor"]
    assert sum(name.endswith("gate.weight") for name in plain) > 0
    assert not [name for name, entry in header.entries.items() if "gate.weight" in name and entry.kind != "Tensor"]


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a packed model, whose other files tests may not change."""
    folder = tmp_path_factory.mktemp("packed") / "qwen3"
    pack(GOLDEN / "qwen3", folder)
    return folder


@pytest.fixture
def copy(packed: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(packed, tmp_path / "copy"))


def test_weights_are_mapped_read_only_and_their_pages_are_shared(packed: Path) -> None:
    model = load(packed)
    smaps = Path("/proc/self/smaps").read_text()
    mapping = re.search(rf"^\S+ (\S+) .*{re.escape(str(packed / DATA_FILE))}\n((?:[A-Z].*\n)+)", smaps, re.MULTILINE)
    assert mapping and mapping[1] == "r--p"
    assert re.search(r"^Anonymous: +0 kB", mapping[2], re.MULTILINE), "no page is this process's own"
    assert model.num_weight_bytes


def test_formats_and_dtype_are_those_of_the_file(packed: Path) -> None:
    assert str(ModelConfig.from_pretrained(packed).quantization) == "wint8"
    assert load(packed, EIGHT_BITS, dtype="bfloat16")._head.weight.quantization == "wint8"
    with pytest.raises(ConfigError, match="is packed to wint8, got none") as caught:
        load(packed, QuantizationConfig.from_value("none"))
    assert caught.value.field == "quantization"
    with pytest.raises(ConfigError, match="is packed for dtype bfloat16, got float32") as caught:
        load(packed, dtype="float32")
    assert caught.value.field == "dtype"


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_the_fingerprint_is_that_of_the_model_that_was_packed(packed: Path, kv_cache_dtype: str) -> None:
    plain, mapped = (
        load(folder, EIGHT_BITS, dtype="bfloat16", kv_cache_dtype=kv_cache_dtype)
        for folder in (GOLDEN / "qwen3", packed)
    )
    config = EngineConfig(model="qwen3", quantization=EIGHT_BITS)
    expected = make_fingerprint(config, plain.config, plain.key_balance, plain.forms)
    assert make_fingerprint(EngineConfig(model="packed"), mapped.config, mapped.key_balance, mapped.forms) == expected
    assert ("balanced_keys" in expected) == (kv_cache_dtype == "int8")


@pytest.mark.parametrize(
    ("name", "weight"),
    [("glm4_moe", "model.layers.3.mlp.experts.gate_up"), ("ernie4_5_moe", "model.mtp_block.0.mlp.down_proj")],
)
def test_layers_of_models_with_experts_are_packed_too(
    tmp_path: Path, loaded: list[list[mtp.MTPWeights]], name: str, weight: str
) -> None:
    shutil.copytree(GOLDEN / name, tmp_path / "plain")
    config = ModelConfig.from_pretrained(tmp_path / "plain", dtype="bfloat16")
    if name == "glm4_moe":
        tensors = load_file(GOLDEN / "glm4_moe_mtp" / "model.safetensors")
    else:
        source = DummySource(ernie_form(config, find_architecture(config), 0, "normed").shapes(config), seed=0)
        tensors = {key: source.read(key).astype("bfloat16") for key in source.shapes}
    file = tmp_path / "plain" / "model.safetensors"
    save_file(load_file(file) | tensors, file, {"format": "pt"})
    header = pack(tmp_path / "plain", tmp_path / "packed", "wint4")
    assert header.entries[weight].fields["quantization"] == ("wint4" if "experts" in weight else "wint8")
    plain = load(tmp_path / "plain", QuantizationConfig.from_value("wint4"), kv_cache_dtype="int8")
    for target in (load(tmp_path / "packed"), plain):
        mtp.load_mtp_layers(target, None, "default_v1", header.mtp_quantization)
    assert leaves(tuple(loaded[0])) == leaves(tuple(loaded[1]))


@pytest.mark.parametrize("form", ["ernie", "deepseek"])
def test_layers_for_multi_token_prediction_are_packed_too(
    tmp_path: Path, loaded: list[list[mtp.MTPWeights]], form: str
) -> None:
    config = ModelConfig.from_pretrained(DEMO, dtype="float32")
    layers = [DefinedLayer(form, config, seed=2 + index, index=index).weights for index in range(2)]
    write_checkpoint(tmp_path / "plain", layers[0] | layers[1])
    formats = pack(tmp_path / "plain", tmp_path / "packed", "wint4").mtp_quantization
    assert (formats.mlp, formats.head) == ("wint4", "w4a8")
    assert mtp.num_mtp_layers(str(tmp_path / "packed")) == 2
    plain = load(tmp_path / "plain", QuantizationConfig.from_value("wint4"), kv_cache_dtype="int8")
    for target in (load(tmp_path / "packed"), plain):
        assert len(mtp.load_mtp_layers(target, None, "default_v1", formats, 2)) == 2
        assert len(mtp.load_mtp_layers(target, target.config.path, "default_v1", formats)) == 1
    assert len(loaded) == 4 and leaves(tuple(loaded[0])) == leaves(tuple(loaded[2]))
    with pytest.raises(ConfigError, match="packed has packed weights, expected plain ones"):
        mtp.load_mtp_layers(target, str(tmp_path / "packed"), "default_v1", formats)
    with pytest.raises(ConfigError, match=r"has layers packed to .*head w4a8, got wint8") as caught:
        mtp.load_mtp_layers(load(tmp_path / "packed"), None, "default_v1", EIGHT_BITS.for_model(False))
    assert caught.value.field == "speculative_config.quantization"


def test_an_embedding_that_repeats_the_targets_is_not_packed_a_second_time(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "glm4_moe", tmp_path / "plain")
    file = tmp_path / "plain" / "model.safetensors"
    tensors = load_file(file) | load_file(GOLDEN / "glm4_moe_mtp" / "model.safetensors")
    tensors["model.layers.3.embed_tokens.weight"] = tensors["model.embed_tokens.weight"]
    save_file(tensors, file, {"format": "pt"})
    header = pack(tmp_path / "plain", tmp_path / "packed", "wint4")
    assert "model.layers.3.eh_proj.weight" in header.mtp_tensors
    assert "model.layers.3.embed_tokens.weight" not in {*header.mtp_tensors, *header.entries}
    target = load(tmp_path / "packed")
    (layer,) = mtp.load_mtp_layers(target, None, "default_v1", header.mtp_quantization)
    assert layer._embedding is target.shared.embedding


def test_layers_from_another_folder_use_the_head_of_a_packed_target(tmp_path: Path) -> None:
    pack(DEMO, tmp_path / "packed")
    target, formats = load(tmp_path / "packed"), EIGHT_BITS.for_model(False)
    (layer,) = mtp.load_mtp_layers(target, str(DEMO), "default_v1", formats)
    assert layer.head is target.shared.head
    with pytest.raises(
        ConfigError, match=r"is packed, and layers from another folder use its head: .* wint8, got w4a8"
    ):
        mtp.load_mtp_layers(target, str(DEMO), "default_v1", formats.for_mtp_layers("bfloat16"))


def test_layers_that_were_not_packed_are_missed(packed: Path) -> None:
    target = load(packed)
    assert mtp.num_mtp_layers(str(packed)) == 0
    with pytest.raises(ConfigError, match="was packed from a model without a layer for multi-token prediction"):
        mtp.load_mtp_layers(target, None, "default_v1", EIGHT_BITS.for_model(False))


def edit_header(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    file = folder / HEADER_FILE
    header = json.loads(file.read_text())
    edit(header)
    file.write_text(json.dumps(header))


def edit_config(folder: Path, **values: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def flip_a_bit(folder: Path) -> None:
    data = bytearray((folder / DATA_FILE).read_bytes())
    data[len(data) // 2] ^= 1
    (folder / DATA_FILE).write_bytes(data)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "torn data": (
        lambda folder: (folder / DATA_FILE).write_bytes((folder / DATA_FILE).read_bytes()[:-1]),
        r"packed_weights.data: has \d+ bytes, expected \d+; run fastdeploy quantize again",
    ),
    "no data": (lambda folder: (folder / DATA_FILE).unlink(), "packed_weights.data: No such file or directory"),
    "no header": (lambda folder: (folder / HEADER_FILE).unlink(), "packed_weights.data: has no packed_weights.json"),
    "torn header": (
        lambda folder: (folder / HEADER_FILE).write_text((folder / HEADER_FILE).read_text()[:-9]),
        "cannot read .*packed_weights.json",
    ),
    "edited header": (
        lambda folder: edit_header(folder, lambda header: header["content"].update(dtype="float32")),
        "packed_weights.json: was changed after it was written",
    ),
    "older": (
        lambda folder: edit_header(folder, lambda header: header.update(version=0)),
        "packed_weights.json: has version 0, expected 1; run fastdeploy quantize again",
    ),
    "foreign": (
        lambda folder: (folder / HEADER_FILE).write_text('{"metadata": {"total_size": 4}}'),
        "packed_weights.json: expected the format 'fastdeploy packed weights', got None",
    ),
    "flipped bit": (flip_a_bit, "packed_weights.data: the bytes of model.* were changed; run fastdeploy quantize"),
    "another size": (
        lambda folder: edit_config(folder, intermediate_size=96),
        r"mlp.gate_proj\+up_proj has out_features \d+, config.json implies 96",
    ),
    "another number of experts": (
        lambda folder: (shutil.rmtree(folder), pack(GOLDEN / "qwen3_moe", folder), edit_config(folder, num_experts=4)),
        r"mlp.experts.gate_up has num_experts \d+, config.json implies 4",
    ),
    "another layer": (
        lambda folder: edit_config(folder, num_hidden_layers=9),
        "packed_weights.data: model.layers.* is missing",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_files_that_do_not_fit_are_refused_in_one_line(copy: Path, name: str) -> None:
    damage, message = DAMAGE[name]
    damage(copy)
    with pytest.raises(ConfigError, match=message) as caught:
        load(copy)
    assert caught.value.field == "model" and "\n" not in str(caught.value)


def test_checksums_can_be_left_out(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flip_a_bit(copy)
    monkeypatch.setenv("FD_VERIFY_WEIGHTS", "0")
    load(copy)


def test_another_layout_and_another_device_are_refused(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(BACKEND), "weight_layout", "panels32-1")
    with pytest.raises(ConfigError, match="has layout 'panels16-2', expected panels32-1; run fastdeploy quantize"):
        load(packed)
    monkeypatch.setattr(type(BACKEND), "weight_layout", GpuBackend.weight_layout)
    monkeypatch.setattr(type(BACKEND), "device", "gpu")
    with pytest.raises(ConfigError, match="packed weights are for --device cpu; give --device gpu the model that was"):
        load(packed)


def test_a_folder_is_complete_or_not_there(packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="is packed already"):
        pack(packed, tmp_path / "again")
    with pytest.raises(ConfigError, match=r"OUT: .*copy exists and is not an empty folder"):
        pack(GOLDEN / "qwen3", Path(shutil.copytree(packed, tmp_path / "copy")))
    (tmp_path / "empty").mkdir()
    pack(GOLDEN / "qwen3", tmp_path / "empty")
    assert read_packed_header(tmp_path / "empty") == read_packed_header(packed)

    def fill_the_disk(self: PackedWriter, tensor: Tensor) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(PackedWriter, "_write", fill_the_disk)
    with pytest.raises(ConfigError, match=r"OUT: cannot write .*full: No space left on device"):
        pack(GOLDEN / "qwen3", tmp_path / "full")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy", "empty"]
