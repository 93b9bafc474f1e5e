# SPDX-License-Identifier: Apache-2.0
"""Engines of one group give equal texts, and blocks move between equal layouts; what must differ in either does."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fastdeploy.config.engine_config import EngineConfig
from fastdeploy.config.speculative_keys import parse_speculative_config
from fastdeploy.engine import cluster_group, engine_factory
from fastdeploy.engine.engine import Engine
from fastdeploy.engine.engine_factory import _read_model_files, make_engine
from fastdeploy.engine.kv_transfer import KVTransfer
from fastdeploy.hub.model_path import resolve_model_path
from fastdeploy.kv_cache.connectors.base import Host
from fastdeploy.models import attention_part
from fastdeploy.models.balanced_keys import Exponents
from fastdeploy.models.decoder import CausalLM
from fastdeploy.ops.golden import golden_digest
from fastdeploy.scheduler.messages import NodeRecord, decode_record, encode
from fastdeploy.scheduler.request_states import Role
from fastdeploy.spec_decode.drafting.loaded_models import DraftingModel, key_balances
from fastdeploy.worker.block_mover import BlockMover
from tests.exactness.engines import config, configured


def clustered(cfg: EngineConfig, **changes: Any) -> EngineConfig:
    return replace(cfg, is_clustered=True, hands_over=True, **changes)


def cluster_of(cfg: EngineConfig) -> dict[str, Any]:
    description: dict[str, Any] = make_engine(cfg).describe()["cluster"]
    return description


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    return cluster_of(clustered(config()))


def copied(folder: Path) -> str:
    shutil.copytree(resolve_model_path("demo"), folder / "model")
    return str(folder / "model")


def test_an_engine_alone_has_no_arena_and_describes_no_group() -> None:
    engine = make_engine(config())
    assert engine.transfer is None and "cluster" not in engine.describe()


def test_with_one_queue_there_is_a_group_and_no_arena(plain: dict[str, Any]) -> None:
    engine = make_engine(replace(config(), is_clustered=True))
    assert engine.transfer is None
    cluster = engine.describe()["cluster"]
    assert cluster["group"] != plain["group"], "its nodes leave tickets for prefill standing"
    nothing = {"layouts": {}, "num_slots": 0, "slot_bytes": 0, "bytes": 0}
    assert cluster == plain | nothing | {name: cluster[name] for name in ("group", "parts")}
    assert [name for name in plain["parts"] if plain["parts"][name] != cluster["parts"][name]] == ["hands_over"]


def test_equal_files_in_another_folder_form_one_group(tmp_path: Path, plain: dict[str, Any]) -> None:
    model = copied(tmp_path)
    assert cluster_of(clustered(config(), model=model)) == plain
    assert (
        make_engine(config()).describe()["fingerprint"]
        == make_engine(replace(config(), model=model)).describe()["fingerprint"]
    )


def test_other_weights_form_another_group(tmp_path: Path, plain: dict[str, Any]) -> None:
    model = copied(tmp_path)
    with Path(model, "model.safetensors").open("r+b") as file:
        file.seek(-2, 2)
        byte = file.read(1)
        file.seek(-2, 2)
        file.write(bytes([byte[0] ^ 1]))
    other = cluster_of(clustered(config(), model=model))
    assert other["group"] != plain["group"] and other["layouts"] != plain["layouts"]


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "float32"},
        {"hf_overrides": {"rope_theta": 2e5}},
        {"max_model_len": 128},
        {"logprobs_mode": "processed_logprobs"},
        {"reasoning_parser": "qwen3"},
        {"guided_decoding_backend": "off"},
        {"speculative": config(verify_strategy="greedy").speculative},
        {"speculative": config("ngram", 3, verify_strategy="topp_relaxed").speculative},
    ],
)
def test_what_changes_texts_or_admission_changes_the_group(plain: dict[str, Any], changes: dict[str, Any]) -> None:
    other = cluster_of(clustered(config(), **changes))
    assert other["group"] != plain["group"]
    same_layout = changes.keys() <= {"max_model_len", "logprobs_mode", "reasoning_parser", "guided_decoding_backend"}
    assert (other["layouts"] == plain["layouts"]) == (same_layout or "greedy" in str(changes))


def test_another_tokenizer_changes_the_group_and_not_the_layout(tmp_path: Path, plain: dict[str, Any]) -> None:
    model = copied(tmp_path)
    file = Path(model, "tokenizer.json")
    text = file.read_text()
    assert text.count('"lstrip":false') or text.count('"lstrip": false')
    file.write_text(text.replace('"lstrip":false', '"lstrip":true', 1).replace('"lstrip": false', '"lstrip": true', 1))
    other = cluster_of(clustered(config(), model=model))
    assert other["group"] != plain["group"] and other["layouts"] == plain["layouts"]


def test_a_processor_that_computes_other_bits_is_in_another_group(
    plain: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_group, "golden_digest", lambda: "other bits")
    assert cluster_of(clustered(config()))["group"] != plain["group"]


def test_golden_outputs_are_the_same_each_time_and_follow_the_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    from fastdeploy.ops import registry

    first = golden_digest()
    assert golden_digest() == first
    for name in ("append_attention", "linear", "rms_norm", "sample", "logprobs", "verify_draft_tokens"):
        with monkeypatch.context() as patch:
            entry = registry.entries()[name]
            patch.setattr(entry, "examples", entry.examples[1:])
            assert golden_digest() != first


def test_methods_of_speculation_may_differ_and_drafting_models_have_layouts_of_their_own(plain: dict[str, Any]) -> None:
    found = {method: cluster_of(clustered(config(configured(method), 3))) for method in ("ngram", "mtp", "draft_model")}
    assert {one["group"] for one in found.values()} == {plain["group"]}
    assert {one["layouts"]["target"] for one in found.values()} == {plain["layouts"]["target"]}
    assert [sorted(one["layouts"]) for one in found.values()] == [
        ["target"],
        ["drafting", "states", "target"],
        ["drafting", "target"],
    ]
    assert found["mtp"]["layouts"]["drafting"] != found["draft_model"]["layouts"]["drafting"]
    speculative = parse_speculative_config({"method": "mtp", "num_speculative_tokens": 3, "mtp_hidden_state": "raw"})
    raw = cluster_of(clustered(config("mtp", 3), speculative=speculative))["layouts"]
    assert [part for part in raw if raw[part] == found["mtp"]["layouts"][part]] == ["target"]


def test_trained_heads_have_layouts_of_their_own_and_equal_ones_in_any_folder(
    plain: dict[str, Any], tmp_path: Path
) -> None:
    def layouts(method: str, model: str) -> dict[str, str]:
        speculative = parse_speculative_config({"method": method, "model": model, "num_speculative_tokens": 3})
        found = cluster_of(clustered(config("eagle", 3), speculative=speculative))
        assert found["group"] == plain["group"]
        return dict(found["layouts"])

    eagle3 = layouts("eagle3", "demo/eagle3")
    assert sorted(eagle3) == ["drafting", "states", "target"]
    assert layouts("mlp_speculator", "demo/mlp") == {"target": eagle3["target"]}
    shutil.copytree(resolve_model_path("demo/eagle3"), tmp_path / "copy")
    assert layouts("eagle3", str(tmp_path / "copy")) == eagle3
    file = tmp_path / "copy" / "config.json"
    taps = {"eagle_aux_hidden_state_layer_ids": [1, 6, 10]}
    file.write_text(json.dumps(json.loads(file.read_text()) | taps))
    for other in (layouts("eagle3", str(tmp_path / "copy")), layouts("eagle", "demo/eagle")):
        assert [part for part in other if other[part] == eagle3[part]] == ["target"]


@pytest.mark.parametrize("method", ["mtp", "draft_model"])
def test_keys_of_the_target_and_of_the_drafting_model_are_balanced_for_an_int8_cache(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[tuple[str, str]] = []

    def record(target: CausalLM, drafting: DraftingModel | None) -> tuple[str, str]:
        found.append(key_balances(target, drafting))
        return found[-1]

    monkeypatch.setattr(engine_factory, "key_balances", record)
    for dtype in ("auto", "int8"):
        cfg = config(method, 3)
        cluster_of(clustered(cfg, cache=replace(cfg.cache, dtype=dtype)))
    assert found[0] == ("", "") and all(found[1]) and len(set(found[1])) == 2


@pytest.mark.parametrize(
    ("balances", "changed"),
    [(("a", "other"), ["drafting"]), (("other", "b"), ["target"])],
)
def test_what_keys_are_divided_by_is_part_of_the_layout(
    balances: tuple[str, str], changed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    layouts = []
    for divided_by in (("a", "b"), balances):
        monkeypatch.setattr(engine_factory, "key_balances", lambda *_, found=divided_by: found)
        layouts.append(cluster_of(clustered(config("mtp", 3)))["layouts"])
    assert [part for part in layouts[0] if layouts[0][part] != layouts[1][part]] == changed


def test_what_keys_are_divided_by_is_part_of_the_group_if_it_decides_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    def other_exponents(squares: NDArray[np.float64], pairs: NDArray[np.intp]) -> Exponents:
        return np.full(squares.shape, 3, np.int8)

    def parts(dtype: str) -> dict[str, str]:
        cfg = config()
        found: dict[str, str] = cluster_of(clustered(cfg, cache=replace(cfg.cache, dtype=dtype)))["parts"]
        return found

    usual = {dtype: parts(dtype) for dtype in ("auto", "int8")}
    monkeypatch.setattr(attention_part, "choose_exponents", other_exponents)
    other = {dtype: parts(dtype) for dtype in usual}
    assert other["auto"] == usual["auto"]
    assert [name for name in usual["int8"] if usual["int8"][name] != other["int8"][name]] == ["balanced_keys"]


@pytest.mark.parametrize("block_size", [16, 64])
def test_the_block_size_is_part_of_the_layout_and_not_of_the_group(plain: dict[str, Any], block_size: int) -> None:
    cfg = config()
    other = cluster_of(clustered(cfg, cache=replace(cfg.cache, block_size=block_size)))
    assert other["group"] == plain["group"]
    assert (other["layouts"] == plain["layouts"]) == (block_size == 16)


@pytest.mark.parametrize("method", ["naive", "mtp", "draft_model"])
@pytest.mark.parametrize("dtype", ["auto", "int8"])
def test_the_arena_is_as_large_as_planned(method: str, dtype: str) -> None:
    cfg = config(method, 3 if method != "naive" else 0)
    cache = replace(cfg.cache, dtype=dtype, num_blocks=400)
    engine = make_engine(clustered(cfg, cache=cache))
    cluster, transfer = engine.describe()["cluster"], engine.transfer
    assert isinstance(transfer, KVTransfer) and isinstance(transfer._mover, BlockMover)
    arena = transfer.arena
    stride = arena.address(1) - arena.address(0)
    assert (cluster["num_slots"], cluster["slot_bytes"]) == (arena.num_slots, stride)
    assert cluster["bytes"] == arena.num_slots * stride
    assert {part.name: part.digest for part in arena.parts.values()} == cluster["layouts"]
    assert arena.num_slots <= 100 < arena.num_slots + 25, "a quarter of the cache's bytes"


def test_waiting_tokens_are_counted_in_a_cluster(plain: dict[str, Any]) -> None:
    from tests.ipc.served_engines import request

    def waiting(engine: Engine) -> int:
        engine.add_request(request(num_prompt=100, max_tokens=3))
        found = [engine.stats().num_waiting_tokens]
        while engine.has_unfinished():
            engine.step()
            found.append(engine.stats().num_waiting_tokens)
        assert found[1:] == [0] * len(found[1:]) or len(found) == 1
        return found[0]

    assert waiting(make_engine(clustered(config()))) == 100
    assert waiting(make_engine(config())) == 0


@pytest.mark.parametrize("changes", [{"eos_token_ids": [5]}, {"vocab_limit": 100}, {"tokenizer": None}])
def test_end_tokens_and_vocabulary_are_part_of_the_group(changes: dict[str, Any]) -> None:
    spec, _ = _read_model_files(config())
    fingerprint = {"dtype": "bfloat16", "tensor_parallel_size": 1}
    parts = cluster_group.group_parts(spec, fingerprint, 256)
    other = cluster_group.group_parts(replace(spec, **changes), fingerprint, 256)
    assert [name for name in parts if parts[name] != other[name]] == list(changes)
    assert cluster_group.group_digest(parts) != cluster_group.group_digest(other)
    assert cluster_group.group_parts(spec, fingerprint | {"tensor_parallel_size": 4}, 256) == parts


@pytest.mark.parametrize("changes", [{"num_kv_heads": 4}, {"head_dim": 32}, {"has_int8_cache": True}])
def test_layouts_depend_on_what_a_layer_caches_per_token(changes: dict[str, Any]) -> None:
    spec, drafting = _read_model_files(config("draft_model", 3))
    assert drafting is not None

    def layouts(target: dict[str, Any], draft: dict[str, Any]) -> dict[str, str]:
        changed = replace(spec, model_config=replace(spec.model_config, **target))
        model = replace(drafting, config=replace(drafting.config, **draft))
        return cluster_group.layout_digests(changed, {}, model, ("", ""))

    plain = layouts({}, {})
    assert plain == layouts({}, {}) and sorted(plain) == ["drafting", "target"]
    assert {part for part in plain if layouts(changes, {})[part] != plain[part]} == {"target"}
    assert {part for part in plain if layouts({}, changes)[part] != plain[part]} == {"drafting"}


def test_parts_are_short_lines_and_the_group_is_their_digest(plain: dict[str, Any]) -> None:
    parts = plain["parts"]
    assert parts.keys() >= {"isa", "operator_library", "results of operators", "max_model_len", "checkpoint"}
    assert all(re.fullmatch(r"[ -~]{1,60}", text) for text in parts.values())
    assert plain["group"] == cluster_group.group_digest(parts)
    record = NodeRecord(1, 1, Role.MIXED, plain["group"], Host("b", "n", 0), parts=parts)
    assert decode_record(encode(record)).parts == parts
