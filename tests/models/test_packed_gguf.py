# SPDX-License-Identifier: Apache-2.0
"""A folder packed from a GGUF file gives the bits of the file itself, or is refused if it was changed."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastdeploy.config.engine_config import EngineConfig
from fastdeploy.config.model_config import ModelConfig
from fastdeploy.config.packed_checkpoint import AGAIN, DATA_FILE, HEADER_FILE, PackedHeader
from fastdeploy.config.quantization import UNQUANTIZED
from fastdeploy.core.errors import ConfigError
from fastdeploy.engine.description import make_fingerprint
from fastdeploy.engine.weight_memory import weight_bytes
from fastdeploy.models.decoder import CausalLM
from fastdeploy.models.loader import load_model
from fastdeploy.models.packing import pack_checkpoint
from tests.gguf.gguf_files import gguf_path
from tests.models.gguf_weights import Formats, config_of, formats
from tests.models.model_driver import MAX_MODEL_LEN, MAX_ROWS, Driver
from tests.models.test_packed_headers import logits, mutate, write_header
from tests.models.test_row_independence import assert_same_bits, tokens_of

CASES: list[tuple[str, Formats, str]] = [
    ("ernie4_5_q4_1", "", "bfloat16"),
    ("qwen2_q8_0", "w8a8", "bfloat16"),
    ("qwen2_q8_0", {"head": "wint4", "mlp": "w4a8"}, "bfloat16"),
    ("qwen2_k", "w4a8", "bfloat16"),
    ("llama_k", "", "bfloat16"),
    ("llama_k", "", "float32"),
    ("llama_k", "none", "bfloat16"),
    ("llama_groups", "", "bfloat16"),
    ("llama_groups", "wint4", "bfloat16"),
    ("llama_groups", {"attention": "gguf", "head": "w8a8"}, "bfloat16"),
    ("llama_f32", "", "float32"),
    ("llama_f32", "wint8", "bfloat16"),
    ("qwen3moe_groups", "", "bfloat16"),
    ("qwen3moe_k", "w8a8", "bfloat16"),
    ("ernie4_5_moe_groups", {"experts": "w4a8"}, "bfloat16"),
    ("ernie4_5_moe_k", "", "bfloat16"),
    ("glm4moe_groups", "wint4", "bfloat16"),
    ("glm4moe_groups", "", "bfloat16"),
    ("glm4moe_mtp", "w8a8", "bfloat16"),
]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the files' folders be derived in a cache of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def load(config: ModelConfig, wanted: Formats = "") -> CausalLM:
    return load_model(config, max_rows=MAX_ROWS, max_model_len=MAX_MODEL_LEN, quantization=formats(wanted))


def pack(path: Path, folder: Path, wanted: Formats = "", dtype: str = "bfloat16") -> PackedHeader:
    return pack_checkpoint(config_of(path, dtype=dtype), folder, formats(wanted))


def fingerprint(model: CausalLM, wanted: Formats = "") -> dict[str, Any]:
    config = EngineConfig(model="gguf", quantization=formats(wanted))
    return make_fingerprint(config, model.config, model.key_balance, model.forms)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
@pytest.mark.parametrize(("name", "wanted", "dtype"), CASES)
def test_a_packed_file_has_the_bits_and_the_fingerprint_of_the_file(
    name: str, wanted: Formats, dtype: str, kv_cache_dtype: str, tmp_path: Path
) -> None:
    if dtype == "float32" and kv_cache_dtype == "int8":
        return
    pack(gguf_path(name), tmp_path / "packed", wanted, dtype)
    packed = load(ModelConfig.from_pretrained(tmp_path / "packed", kv_cache_dtype=kv_cache_dtype))
    plain = load(config_of(gguf_path(name), dtype=dtype, kv_cache_dtype=kv_cache_dtype), wanted)
    assert_same_bits(Driver(packed).run_alone(tokens_of(3)), Driver(plain).run_alone(tokens_of(3)))
    assert packed.num_weight_bytes == plain.num_weight_bytes
    assert (packed.shared.embedding.table is packed.shared.head.weight) == (
        plain.shared.embedding.table is plain.shared.head.weight
    )
    assert fingerprint(packed) == fingerprint(plain, wanted)
    assert sum(weight_bytes(packed.config, UNQUANTIZED).values()) >= 0.85 * packed.num_weight_bytes
    assert not [file for file in (tmp_path / "packed").iterdir() if file.suffix == ".gguf" or file.is_symlink()]


QKV = "model.layers.0.self_attn.q_proj+k_proj+v_proj"
TABLE, HEAD = "model.embed_tokens.weight", "model.embed_tokens.weight.head"


def set_field(name: str, field: str, value: Any) -> Callable[[Any], None]:
    def edit(content: Any) -> None:
        content["entries"][name]["fields"][field] = value

    return edit


def remove(name: str, field: str = "") -> Callable[[Any], None]:
    def edit(content: Any) -> None:
        entries = content["entries"]
        del (entries[name]["fields"] if field else entries)[field or name]

    return edit


DAMAGE: list[tuple[Callable[[Any], None], str]] = [
    (set_field(QKV, "quantization", "wint5"), f"{QKV} has an unknown form"),
    (set_field(QKV, "quantization", ["wint4"]), f"{QKV} has an unknown form"),
    (set_field(QKV, "quantization", 4), f"{QKV} has an unknown form"),
    (set_field(QKV, "group_size", 48), f"{QKV} has an unknown form"),
    (set_field(QKV, "group_size", 32.0), f"{QKV} has an unknown form"),
    (set_field(QKV, "has_minimum", "yes"), f"{QKV} has an unknown form"),
    (set_field(QKV, "has_minimum", 1), f"{QKV} has an unknown form"),
    (set_field(QKV, "has_minimum", False), f"{QKV} has data uint8"),
    (set_field(QKV, "quantization", "wint8"), f"{QKV} has data uint8"),
    (set_field(QKV, "quantization", "none"), f"{QKV} has group_size 32, config.json implies 0"),
    (set_field(HEAD, "quantization", "wint4"), f"{HEAD} has data uint8"),
    (remove(QKV, "quantization"), f"{QKV} has quantization 'nothing', config.json implies none"),
    (remove(QKV, "group_size"), f"{QKV} has group_size 'nothing', config.json implies 0"),
    (remove(QKV, "has_minimum"), f"{QKV} has has_minimum 'nothing', config.json implies False"),
    (remove(QKV), f"{QKV} is missing"),
    (remove(HEAD), f"{HEAD} is missing"),
]


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the packed weights of a file, whose header tests may change."""
    folder = tmp_path_factory.mktemp("packed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        pack(gguf_path("ernie4_5_q4_1"), folder / "packed")
    return folder / "packed"


@pytest.mark.parametrize("number", range(len(DAMAGE)), ids=[message for _, message in DAMAGE])
def test_an_entry_of_an_unknown_form_and_a_missing_one_are_refused_in_one_line(number: int, packed: Path) -> None:
    edit, message = DAMAGE[number]
    before = (packed / HEADER_FILE).read_text()
    content = json.loads(before)["content"]
    edit(content)
    write_header(packed, content)
    try:
        with pytest.raises(ConfigError) as caught:
            load(ModelConfig.from_pretrained(packed))
    finally:
        (packed / HEADER_FILE).write_text(before)
    assert caught.value.field == "model" and "\n" not in str(caught.value)
    assert f"{packed / DATA_FILE}: {message}" in str(caught.value) and AGAIN in str(caught.value)


def test_rewritten_headers_load_the_same_bits_or_are_refused_in_one_line(packed: Path) -> None:
    before = (packed / HEADER_FILE).read_text()
    content, expected, chance = json.loads(before)["content"], logits(packed), random.Random(1)
    num_same, num_refused = 0, 0
    for index in range(120):
        mutated = deepcopy(content)
        path = mutate(chance, mutated)
        if path[-1] in ("quantization", "group_size", "has_minimum"):
            continue  # only the header knows these: another form of the same size cannot be told from it
        write_header(packed, mutated)
        try:
            found = logits(packed)
        except ConfigError as error:
            assert "\n" not in str(error) and str(packed) in str(error), (index, path)
            num_refused += 1
        else:
            np.testing.assert_array_equal(found, expected, err_msg=f"{index} {path}")
            num_same += 1
    (packed / HEADER_FILE).write_text(before)
    assert num_refused > 80 and num_same < 40


def test_a_folder_whose_config_json_lost_the_format_of_the_file_is_refused(packed: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(packed, tmp_path / "copy"))
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError) as caught:
        load(ModelConfig.from_pretrained(folder))
    assert "\n" not in str(caught.value) and str(folder) in str(caught.value)


def test_formats_and_dtype_are_those_of_the_folder(packed: Path) -> None:
    config = ModelConfig.from_pretrained(packed)
    assert str(config.weight_formats(UNQUANTIZED)) == str(config.weight_formats(formats("gguf"))) == "gguf"
    for wanted in ("none", "w8a8"):
        with pytest.raises(ConfigError, match=f"is packed to gguf, got {wanted}") as caught:
            load(config, wanted)
        assert caught.value.field == "quantization"
    with pytest.raises(ConfigError, match="is packed for dtype bfloat16, got float32"):
        ModelConfig.from_pretrained(packed, dtype="float32")
