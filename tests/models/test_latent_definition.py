# SPDX-License-Identifier: Apache-2.0
"""The definition of models with latent attention has the values of transformers; each of its parts moves them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.models.latent_definition import (
    BIASED,
    Floats,
    LatentDefinition,
    LatentForm,
    load_definition,
    read_rope,
)
from tests.models.latent_forms import FORMS, ROWS, write_form
from tests.models.latent_forms import TOKENS as FORM_TOKENS
from tests.models.model_driver import GOLDEN
from tests.models.mtp_training import Counts, replay

LATENT = GOLDEN / "latent"
NAMES = sorted(path.parent.name for path in LATENT.glob("*/config.json"))
WITH_LAYER = ("deepseek_v3", "glm4_moe_lite")
NUM_DRAFTS, PROMPT_LEN = 3, 16
TOLERANCE = 1e-5  # of the definition; an engine's is ten times as large
LAYER_TOLERANCE = 2e-5  # trained weights enlarge the rounding of transformers' float32
MOVED = 1e-3  # more than ten times an engine's tolerance


def reference(name: str) -> Mapping[str, NDArray[Any]]:
    with np.load(LATENT / name / "reference.npz") as values:
        return dict(values)


def with_layer(name: str) -> LatentDefinition:
    return load_definition(LATENT / name, LATENT / f"{name}_mtp")


def changes_of(form: LatentForm) -> dict[str, dict[str, Any]]:
    """Return the values of a form without a part, or with the other choice, by the name of the part."""
    return {
        "frequencies": {"frequencies": read_rope({"rope_theta": form.theta}, form.rotary_dim)[0]},
        "interleaving": {"is_interleaved": not form.is_interleaved},
        "factor of the scores": {"score_factor": 1.0},
        "factor of cosines": {"magnitude": 1.0},
        "eps of the query": {"q_eps": 1e-5},
        "eps of the key": {"kv_eps": 1e-5},
        "norm of the query": {"has_q_norm": False},
        "norm of the key": {"has_kv_norm": False},
        **{f"bias of {name}": {"biased": BIASED - {name}} for name in BIASED},
        "scoring": {"scoring": "softmax" if form.scoring == "sigmoid" else "sigmoid"},
        "correction bias": {"has_correction_bias": False},
        "groups": {"num_groups": 1, "num_kept": 1},
        "scores of a group": {"num_of_group": 3 - form.num_of_group},
        "normalization": {"is_normalized": not form.is_normalized},
        "scale of experts": {"routed_scale": 1.0},
        "shared experts": {"has_shared_experts": False},
    }


EVERYWHERE = ("interleaving", "scoring", "norm of the key", "eps of the key", "shared experts", "normalization")
QUERY = ("norm of the query", "eps of the query")
YARN = ("frequencies", "factor of the scores")
EXPECTED = {
    "deepseek_v2": (*EVERYWHERE, *QUERY, *YARN, "groups", "scores of a group", "scale of experts"),
    "deepseek_v2_lite": (*EVERYWHERE, *YARN),
    "deepseek_v3": (
        *(*EVERYWHERE, *QUERY, *YARN, "groups", "scores of a group", "scale of experts", "correction bias"),
    ),
    "deepseek_v3_halves": (
        *(*EVERYWHERE, *YARN, "factor of cosines", "scale of experts", "correction bias"),
        *("bias of kv_a_proj_with_mqa", "bias of o_proj"),
    ),
    "glm4_moe_lite": (*EVERYWHERE, *QUERY, "scale of experts", "correction bias"),
    "glm4_moe_lite_bias": (
        *(*EVERYWHERE, *QUERY, *YARN, "factor of cosines", "groups", "scores of a group", "scale of experts"),
        *("correction bias", *(f"bias of {name}" for name in BIASED)),
    ),
}
"""The parts that each golden has; goldens whose rms_norm_eps is 1e-6 are compared with an epsilon of 1e-5."""


def logprobs_of(model: LatentDefinition, tokens: NDArray[np.int32]) -> Floats:
    return model.logprobs(model.states(tokens.tolist()))


def test_the_goldens_are_those_of_the_expected_parts() -> None:
    assert set(NAMES) == set(EXPECTED)


@pytest.mark.parametrize("name", NAMES)
def test_the_definition_has_the_values_of_transformers(name: str) -> None:
    expected = reference(name)
    found = logprobs_of(load_definition(LATENT / name), expected["tokens"])
    np.testing.assert_allclose(found[expected["positions"]], expected["logprobs_float32"], rtol=0, atol=TOLERANCE)
    np.testing.assert_array_equal(found.argmax(-1), expected["argmax_float32"])


@pytest.mark.parametrize("form", FORMS)
def test_the_definition_has_the_values_of_transformers_in_other_forms(form: str, tmp_path: Path) -> None:
    model = load_definition(write_form(tmp_path / "model", form))
    found = model.logprobs(model.states(FORM_TOKENS))[list(ROWS)]
    np.testing.assert_allclose(found, np.load(GOLDEN / "latent_forms.npz")[form], rtol=0, atol=TOLERANCE)
    assert min(model.margins) > MOVED


@pytest.mark.parametrize("name", NAMES)
def test_each_part_moves_the_values_and_the_others_do_not_exist(name: str) -> None:
    expected, model = reference(name), load_definition(LATENT / name)
    form = model.form
    for part, values in changes_of(form).items():
        model.form = replace(form, **values)
        found = logprobs_of(model, expected["tokens"])[expected["positions"]]
        error = np.abs(found - expected["logprobs_float32"]).max()
        assert error > MOVED if part in EXPECTED[name] else error < TOLERANCE, part


@pytest.mark.parametrize("name", [*NAMES, *(f"{name}_mtp" for name in WITH_LAYER)])
def test_no_row_of_a_latent_golden_is_near_a_tie(name: str) -> None:
    target = name.removesuffix("_mtp")
    tokens, model = (
        reference(target)["tokens"].tolist(),
        with_layer(target) if name != target else load_definition(LATENT / name),
    )
    states = model.states(tokens)
    if name != target:
        model.margins.clear()
        list(islice(model.drafts(tokens, states), NUM_DRAFTS))
    assert len(model.margins) > 50 and min(model.margins) > 1e-3


def layer_logprobs(model: LatentDefinition, tokens: list[int], states: Floats) -> tuple[Floats, Floats]:
    """Return log-probabilities of the first draft after each position, and of the drafts after the whole text."""
    first = model.draft_logprobs(model.draft_states(tokens[1:], states[:-1])[0])
    return first, np.stack([logprobs for _, logprobs in islice(model.drafts(tokens, states), NUM_DRAFTS)])


@pytest.mark.parametrize("name", WITH_LAYER)
def test_the_definition_of_the_layer_has_the_values_of_transformers(name: str) -> None:
    expected, model = reference(f"{name}_mtp"), with_layer(name)
    tokens = expected["tokens"].tolist()
    first, drafts = layer_logprobs(model, tokens, model.states(tokens))
    np.testing.assert_allclose(first[expected["positions"]], expected["logprobs"], rtol=0, atol=LAYER_TOLERANCE)
    np.testing.assert_allclose(drafts[1:], expected["chained_logprobs"], rtol=0, atol=LAYER_TOLERANCE)
    assert drafts.argmax(-1).tolist() == expected["drafts"].tolist()


@pytest.mark.parametrize("name", WITH_LAYER)
def test_each_part_moves_the_values_of_the_layer(name: str) -> None:
    expected, model = reference(f"{name}_mtp"), with_layer(name)
    tokens, form = expected["tokens"].tolist(), model.form
    states = model.states(tokens)
    for part in EXPECTED[name]:
        model.form = replace(form, **changes_of(form)[part])
        first = layer_logprobs(model, tokens, states)[0][expected["positions"]]
        assert np.abs(first - expected["logprobs"]).max() > MOVED, part


@pytest.mark.parametrize("name", WITH_LAYER)
def test_the_state_that_is_recycled_moves_later_drafts_alone(name: str) -> None:
    expected, model = reference(f"{name}_mtp"), with_layer(name)
    tokens = expected["tokens"].tolist()
    states = model.states(tokens)
    model.form = replace(model.form, recycles_normed=False)
    first, drafts = layer_logprobs(model, tokens, states)
    np.testing.assert_allclose(first[expected["positions"]], expected["logprobs"], rtol=0, atol=LAYER_TOLERANCE)
    assert (np.abs(drafts[1:] - expected["chained_logprobs"]).max(-1) > MOVED).all()


def counts_of(model: LatentDefinition, texts: list[list[int]]) -> Counts:
    """Return the counts of engine steps over texts whose drafts the definition makes."""
    states = [model.states(text) for text in texts]

    def drafts_after(index: int, end: int) -> list[int]:
        return [token for token, _ in islice(model.drafts(texts[index][:end], states[index]), NUM_DRAFTS)]

    return replay(texts, PROMPT_LEN, NUM_DRAFTS, drafts_after)


@pytest.mark.parametrize("name", WITH_LAYER)
def test_the_layer_has_the_acceptance_of_transformers(name: str) -> None:
    expected = reference(f"{name}_mtp")
    texts, drafts = expected["texts"].tolist(), expected["drafts_of_texts"]

    def replayed(chosen: list[int]) -> Counts:
        found = [texts[index] for index in chosen]
        return replay(found, PROMPT_LEN, NUM_DRAFTS, lambda i, end: drafts[chosen[i], end - PROMPT_LEN - 1])

    first_and_last = [0, len(texts) - 1]  # a text that the layer has learnt, and one that it has not
    found = counts_of(with_layer(name), [texts[index] for index in first_and_last])
    np.testing.assert_array_equal(found, replayed(first_and_last))
    counts = replayed(list(range(len(texts))))
    assert (counts[1] > 0).all() and (counts[1] < counts[0]).all()
