# SPDX-License-Identifier: Apache-2.0
"""Latent attention that was packed into files has the bits of the plain checkpoint, or is refused in one line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.paddle import load_file

from fastdeploy.config.engine_config import EngineConfig
from fastdeploy.config.latent_config import LatentConfig
from fastdeploy.config.model_config import ModelConfig
from fastdeploy.config.packed_checkpoint import DATA_FILE, HEADER_FILE
from fastdeploy.config.quantization import FORMATS, UNQUANTIZED, QuantizationConfig
from fastdeploy.config.speculative_config import NaiveConfig
from fastdeploy.core.errors import ConfigError
from fastdeploy.engine.description import digest_checkpoint, make_fingerprint
from fastdeploy.models import mtp
from fastdeploy.models.decoder import CausalLM
from fastdeploy.models.mtp import load_mtp_layers, num_mtp_layers
from tests.engine.test_cluster_group import cluster_of, clustered
from tests.exactness.engines import config as engine_config
from tests.exactness.golden_models import with_model
from tests.exactness.requests import run_all
from tests.models.model_driver import Driver
from tests.models.test_latent_definition import LATENT, NAMES, WITH_LAYER
from tests.models.test_mtp_experts import engine_of, requests_of, with_layer
from tests.models.test_mtp_experts import mtp as drafting
from tests.models.test_packed_headers import write_header
from tests.models.test_packed_weights import edit_config, leaves, load, pack
from tests.models.test_row_independence import assert_same_bits, tokens_of

Formats = str | dict[str, str]
MIXED: list[Formats] = [
    {"attention": "wint4", "experts": "wint8", "head": "w4a8"},
    {"attention": "w4a8_min", "mlp": "wint8"},
    {"mlp": "w8a8", "experts": "wint4_min"},
]
EVERY: list[Formats] = [*FORMATS, *MIXED]
CASES: list[tuple[str, Formats]] = [
    *(("deepseek_v3", formats) for formats in EVERY),
    *((name, EVERY[(3 * index + step) % len(EVERY)]) for index, name in enumerate(NAMES) for step in (0, 4, 7)),
]
KEYS, VALUES = (f"model.layers.1.self_attn.kv_b_proj.{part}" for part in ("keys", "values"))


def fingerprint(model: CausalLM, formats: QuantizationConfig) -> dict[str, Any]:
    config = EngineConfig(model="model", quantization=formats)
    return make_fingerprint(config, model.config, model.key_balance, model.forms)


def check_packed(source: Path, folder: Path, formats: Formats, dtype: str) -> None:
    """Raise AssertionError unless a packed copy is the plain model in all that is computed and said."""
    wanted = QuantizationConfig.from_value(formats)
    header = pack(source, folder / "packed", formats, dtype)
    num_layers = ModelConfig.from_pretrained(source).num_layers
    of_attention = [entry for name, entry in header.entries.items() if ".self_attn." in name and entry.kind != "Tensor"]
    assert sum(entry.kind == "PackedHeads" for entry in of_attention) == 2 * num_layers
    form = header.quantization.attention
    assert {entry.fields["quantization"] for entry in of_attention} == {form.removesuffix("_min")}
    assert {entry.fields["has_minimum"] for entry in of_attention} == {form.endswith("_min")}
    packed, plain = load(folder / "packed"), load(source, wanted, dtype=dtype)
    assert_same_bits(Driver(packed).run_alone(tokens_of(3)), Driver(plain).run_alone(tokens_of(3)))
    assert (packed.num_weight_bytes, packed.num_streamed_bytes) == (plain.num_weight_bytes, plain.num_streamed_bytes)
    assert fingerprint(packed, UNQUANTIZED) == fingerprint(plain, wanted) and packed.forms == plain.forms


@pytest.mark.parametrize(("name", "formats"), CASES, ids=str)
def test_a_packed_model_has_the_bits_of_the_plain_one(name: str, formats: Formats, tmp_path: Path) -> None:
    check_packed(LATENT / name, tmp_path, formats, "bfloat16")


@pytest.mark.parametrize("name", NAMES)
def test_a_packed_model_has_the_bits_of_the_plain_one_in_float32(name: str, tmp_path: Path) -> None:
    check_packed(LATENT / name, tmp_path, "none", "float32")


@pytest.mark.parametrize("formats", ["none", "wint4", *MIXED], ids=str)
@pytest.mark.parametrize("name", WITH_LAYER)
def test_a_layer_in_packed_files_has_the_bits_of_the_plain_one(
    name: str, formats: Formats, tmp_path: Path, loaded: list[list[mtp.MTPWeights]]
) -> None:
    plain = with_layer(tmp_path / "plain", LATENT / name, load_file(LATENT / f"{name}_mtp" / "model.safetensors"))
    header = pack(plain, tmp_path / "packed", formats)
    assert header.entries[KEYS.replace(".1.", ".3.")].kind == "PackedHeads"
    assert num_mtp_layers(str(tmp_path / "packed")) == 1
    for target in (load(tmp_path / "packed"), load(plain, QuantizationConfig.from_value(formats), dtype="bfloat16")):
        load_mtp_layers(target, None, "default_v1", header.mtp_quantization)
    is_same = leaves(tuple(loaded[0])) == leaves(tuple(loaded[1]))
    assert is_same and len(loaded) == 2


@pytest.mark.parametrize("name", WITH_LAYER)
def test_a_layer_in_a_folder_of_its_own_drafts_beside_packed_files(
    name: str, tmp_path: Path, loaded: list[list[mtp.MTPWeights]]
) -> None:
    header = pack(LATENT / name, tmp_path / "packed", "wint8")
    for folder in (tmp_path / "packed", LATENT / name):
        target = load(folder, header.quantization, dtype="bfloat16")
        load_mtp_layers(target, str(LATENT / f"{name}_mtp"), "default_v1", header.quantization)
    (beside_packed,), (beside_plain,) = loaded
    assert beside_plain.embedding is beside_plain.head is None, "they repeat the target's"
    alike = [leaves(replace(layer, embedding=None, head=None)) for layer in (beside_packed, beside_plain)]
    assert alike[0] == alike[1]
    same_head = leaves(beside_packed.head) == leaves(target.shared.head.weight)
    assert same_head


@pytest.mark.parametrize(("name", "quantization"), [("deepseek_v3", "wint4"), ("glm4_moe_lite", "w8a8")])
def test_an_engine_drafts_with_a_packed_layer_and_writes_the_plain_texts(
    name: str, quantization: str, tmp_path: Path
) -> None:
    plain = with_layer(tmp_path / "plain", LATENT / name, load_file(LATENT / f"{name}_mtp" / "model.safetensors"))
    pack(plain, tmp_path / "packed", quantization)
    requests = requests_of(112)
    alone = engine_of(plain, NaiveConfig(), quantization=quantization)
    engine = engine_of(tmp_path / "packed", drafting(), quantization=quantization)
    assert run_all(engine, requests) == run_all(alone, requests)
    for key in ("weights_bytes", "streamed_weights_bytes"):
        assert engine.describe()[key] == alone.describe()[key] > 0
    stats = engine.stats()
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a packed model, which tests copy."""
    folder = tmp_path_factory.mktemp("packed") / "model"
    pack(LATENT / "glm4_moe_lite", folder, "wint4")
    return folder


@pytest.fixture
def copy(packed: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(packed, tmp_path / "copy"))


def refusal(folder: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load(folder)
    assert caught.value.field == "model" and "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"kv_lora_rank": 40}, "0.self_attn.kv_b_proj.keys has out_features 32, config.json implies 40"),
        ({"qk_rope_head_dim": 16}, "0.self_attn.q_a_proj+kv_a_proj_with_mqa has out_features 64, "),
        ({"v_head_dim": 24}, "0.self_attn.kv_b_proj.values has out_features 32, config.json implies 24"),
        ({"qk_nope_head_dim": 16}, "0.self_attn.kv_b_proj.keys has in_features 24, config.json implies 16"),
        ({"q_lora_rank": None}, "0.self_attn.kv_a_proj_with_mqa is missing"),
        ({"q_lora_rank": 32}, "0.self_attn.q_a_proj+kv_a_proj_with_mqa has out_features 64, "),
        ({"attention_bias": True}, "0.self_attn.q_a_proj+kv_a_proj_with_mqa lacks the tensor bias"),
        ({"num_attention_heads": 2, "num_key_value_heads": 2}, "0.self_attn.kv_b_proj.keys has num_heads 4, "),
    ],
)
def test_sizes_that_the_files_do_not_have_are_refused_by_name(
    changes: dict[str, Any], problem: str, copy: Path
) -> None:
    edit_config(copy, **changes)
    message = refusal(copy)
    assert f"{copy}/{DATA_FILE}: model.layers.{problem}" in message and "run fastdeploy quantize again" in message


def content_of(folder: Path) -> Any:
    return json.loads((folder / HEADER_FILE).read_text())["content"]


def change_keys(folder: Path) -> None:
    """Change a byte of the matrices that make keys."""
    data = bytearray((folder / DATA_FILE).read_bytes())
    data[content_of(folder)["entries"][KEYS]["tensors"]["data"]["offset"] + 70] ^= 1
    (folder / DATA_FILE).write_bytes(data)


def edit(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """Return what changes the content of a header, whose digest is right afterwards."""

    def damage(folder: Path) -> None:
        content = content_of(folder)
        change(content)
        write_header(folder, content)

    return damage


def edit_keys(**values: Any) -> Callable[[Path], None]:
    return edit(lambda content: content["entries"][KEYS]["fields"].update(values))


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "changed bytes": (change_keys, f"the bytes of {KEYS} were changed"),
    "older layout": (edit(lambda content: content.update(layout="panels16-1")), "has layout 'panels16-1', expected"),
    "unsplit, as a linear layer": (
        edit(lambda content: content["entries"].update({KEYS.removesuffix(".keys"): content["entries"].pop(KEYS)})),
        f"{KEYS} is missing",
    ),
    "another kind": (
        edit(lambda content: content["entries"][KEYS].update(kind="PackedExperts")),
        f"{KEYS} is a PackedExperts, expected a PackedHeads",
    ),
    "values for keys": (
        edit(lambda content: content["entries"].update({KEYS: content["entries"][VALUES]})),
        "kv_b_proj.values has bytes of another tensor",
    ),
    "another stride": (edit_keys(stride=64), f"{KEYS} has an unknown field stride"),
    "more heads": (edit_keys(num_heads=8), f"{KEYS} has num_heads 8, config.json implies 4"),
    "heads as a float": (edit_keys(num_heads=4.0), f"{KEYS} has num_heads 4.0, config.json implies 4"),
    "another format": (edit_keys(quantization="wint4"), f"{KEYS} has quantization 'wint4', config.json implies wint8"),
    "a minimum": (edit_keys(has_minimum=True), f"{KEYS} has has_minimum True, config.json implies False"),
    "one head less in the file": (
        edit(lambda content: content["entries"][KEYS]["tensors"]["data"].update(shape=[64])),
        f"{KEYS} has data uint8[64], config.json implies uint8[",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_and_edited_parts_of_an_up_projection_are_refused(name: str, copy: Path) -> None:
    damage, problem = DAMAGE[name]
    damage(copy)
    message = refusal(copy)
    assert f"{copy}/packed_weights." in message and problem in message
    assert message.endswith("; run fastdeploy quantize again")


@pytest.mark.parametrize("name", [field.name for field in fields(LatentConfig)])
def test_every_value_of_latent_attention_is_part_of_the_checkpoints_digest(name: str) -> None:
    config = ModelConfig.from_pretrained(LATENT / "deepseek_v3")
    assert config.latent is not None
    value = getattr(config.latent, name)
    other = replace(config, latent=replace(config.latent, **{name: not value if value is True else 2 * value}))
    assert digest_checkpoint(other, "dummy") != digest_checkpoint(config, "dummy")


ROPE = json.loads((LATENT / "deepseek_v3" / "config.json").read_text())["rope_scaling"]


@pytest.mark.parametrize(
    "changes",
    [
        {"qk_nope_head_dim": 8, "qk_rope_head_dim": 24, "kv_lora_rank": 24},
        {"qk_nope_head_dim": 24, "v_head_dim": 8},
        {"rope_interleave": False},
        {"rope_scaling": {**ROPE, "mscale_all_dim": 0.5, "mscale": 0.5}},
    ],
    ids=str,
)
def test_engines_of_other_sizes_pairs_or_scales_exchange_no_blocks(changes: dict[str, Any], tmp_path: Path) -> None:
    """A latent row has equally many bytes in all of them."""

    def cluster(folder: Path) -> dict[str, Any]:
        cfg = with_model(engine_config(), str(folder), "bfloat16")
        return cluster_of(clustered(replace(cfg, load_choices="dummy")))

    other = Path(shutil.copytree(LATENT / "deepseek_v3", tmp_path / "other"))
    plain = cluster(LATENT / "deepseek_v3")
    assert cluster(other)["layouts"] == plain["layouts"]
    edit_config(other, **changes)
    found = cluster(other)
    assert found["layouts"]["target"] != plain["layouts"]["target"] and found["group"] != plain["group"]
    assert found["slot_bytes"] == plain["slot_bytes"]
