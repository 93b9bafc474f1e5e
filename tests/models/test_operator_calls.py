# SPDX-License-Identifier: Apache-2.0
"""The number of operator calls of a step."""

from __future__ import annotations

import pytest

from fastdeploy.config.model_config import ModelConfig
from fastdeploy.ops.quantized_form import FORMS
from tests.models.model_driver import GOLDEN_NAMES, Driver, load_golden
from tests.ops.operator_calls import record_operator_calls

MIXED = "wint4"  # with experts: four bits in the experts, eight in the rest
MODELS = [
    *((name, "float32", "none") for name in GOLDEN_NAMES),
    *(("qwen3", "bfloat16", q) for q in FORMS),
    *((name, "bfloat16", MIXED) for name in ("ernie4_5_moe", "qwen3_moe")),
]
BESIDE_LAYERS = 3  # the index arrays, the embedding and the final norm
ATTENTION, LATENT_ATTENTION, DENSE, SPARSE, SHARED_APART = 3, 6, 2, 3, 2


def calls_of_layers(config: ModelConfig, quantization: str) -> int:
    """Return how many operators the layers call; a shared expert in a format of its own takes two more."""
    sparse = sum(config.experts.sparse_layers) if config.experts else 0
    is_apart = config.experts is not None and config.experts.shared_width > 0 and quantization == MIXED
    in_sparse = SPARSE + (SHARED_APART if is_apart else 0)
    attention = ATTENTION if config.latent is None else LATENT_ATTENTION
    return config.num_layers * attention + (config.num_layers - sparse) * DENSE + sparse * in_sparse


@pytest.mark.parametrize(("name", "dtype", "quantization"), MODELS)
def test_a_layer_takes_five_operator_calls_one_more_with_experts_and_three_with_latent_attention(
    name: str, dtype: str, quantization: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_golden(name, dtype, quantization)  # type: ignore[arg-type]
    driver, calls = Driver(model, captures=False), record_operator_calls(monkeypatch)
    one, other = driver.start(), driver.start()
    for work in ([(one, [1, 2, 3])], [(one, [4]), (other, [5, 6])], [(one, [7])]):
        calls.clear()
        driver.step(work)
        head = 1  # the driver computes the logits of every row
        assert len(calls) == BESIDE_LAYERS + calls_of_layers(model.config, quantization) + head
