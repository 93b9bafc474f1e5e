# SPDX-License-Identifier: Apache-2.0
"""The shipped draft heads by their definition: the files are complete, and the definition reads every key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastdeploy.hub.model_path import resolve_model_path
from tests.spec_decode.heads_definition import HEADS, Drafts, TargetView, read_tensors

DEMO = Path(resolve_model_path("demo"))
SHIPPED = {"eagle": "eagle", "eagle3": "eagle3", "mlp": "mlp_speculator", "medusa": "medusa"}
TEXT = np.random.default_rng(0).integers(8, 4096, 12).tolist()


@pytest.fixture(scope="module")
def view() -> TargetView:
    """Return drawn states with the demonstration model's embedding, which is its head as well."""
    generator = np.random.default_rng(1)
    embedding = read_tensors(DEMO / "model.safetensors")["model.embed_tokens.weight"]
    return TargetView(generator.normal(size=(12, 256)), generator.normal(size=(15, 12, 256)), embedding, embedding)


def drafts_of(folder: Path, method: str, view: TargetView, num_drafts: int = 3) -> Drafts:
    return HEADS[method](folder, "float64").drafts(TEXT, view, num_drafts)


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_head_drafts_and_earlier_drafts_do_not_depend_on_later_ones(name: str, view: TargetView) -> None:
    drafts, first = (drafts_of(DEMO / name, SHIPPED[name], view, count) for count in (3, 1))
    assert drafts.log_probs.shape == (3, 4096) and drafts.ids[:1] == first.ids
    np.testing.assert_allclose(np.exp(drafts.log_probs).sum(-1), 1.0)
    np.testing.assert_allclose(drafts.states[:1], first.states)


def test_the_draft_vocabulary_of_the_shipped_head_is_distinct_and_the_same_in_both_maps(view: TargetView) -> None:
    tensors = read_tensors(DEMO / "eagle3" / "model.safetensors")
    ids = np.arange(2048) + tensors["d2t"]
    assert tensors["t2d"].sum() == 2048 and tensors["t2d"][ids].all()
    assert np.isfinite(drafts_of(DEMO / "eagle3", "eagle3", view).log_probs[0]).nonzero()[0].tolist() == ids.tolist()


@pytest.mark.parametrize(
    "change",
    [
        {"norm_before_residual": True},
        {"norm_output": True},
        {"eagle_aux_hidden_state_layer_ids": [3, 8, 12]},
        {"rope_theta": 100.0},
        {"rms_norm_eps": 0.1},
    ],
    ids=lambda change: next(iter(change)),
)
def test_each_key_of_an_eagle3_head_changes_its_drafts(
    change: dict[str, Any], view: TargetView, tmp_path: Path
) -> None:
    changed = changed_copy(tmp_path, change)
    before, after = (drafts_of(folder, "eagle3", view).log_probs[-1] for folder in (DEMO / "eagle3", changed))
    known = np.isfinite(before)
    assert np.abs(before[known] - after[known]).max() > 1e-3


def test_ids_of_outputs_and_inputs_of_layers_differ_by_one(view: TargetView, tmp_path: Path) -> None:
    changed = changed_copy(
        tmp_path, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 6, 10]}}, without_ids=True
    )
    assert np.array_equal(
        drafts_of(changed, "eagle3", view).log_probs, drafts_of(DEMO / "eagle3", "eagle3", view).log_probs
    )


def changed_copy(folder: Path, change: dict[str, Any], without_ids: bool = False) -> Path:
    """Return a copy of the shipped EAGLE-3 head with other keys in its configuration."""
    config = json.loads((DEMO / "eagle3" / "config.json").read_text())
    if without_ids:
        del config["eagle_aux_hidden_state_layer_ids"]
    (folder / "config.json").write_text(json.dumps(config | change))
    (folder / "model.safetensors").symlink_to(DEMO / "eagle3" / "model.safetensors")
    return folder
