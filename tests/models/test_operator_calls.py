# SPDX-License-Identifier: Apache-2.0
"""The number of operator calls of a step."""

from __future__ import annotations

import pytest

from fastdeploy.ops.linear import QUANTIZATIONS
from tests.models.model_driver import GOLDEN_NAMES, Driver, load_golden
from tests.ops.operator_calls import record_operator_calls

MODELS = [*((name, "float32", "none") for name in GOLDEN_NAMES), *(("qwen3", "bfloat16", q) for q in QUANTIZATIONS)]
BESIDE_LAYERS = 3  # the index arrays, the embedding and the final norm


@pytest.mark.parametrize(("name", "dtype", "quantization"), MODELS)
def test_a_layer_takes_five_operator_calls(
    name: str, dtype: str, quantization: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_golden(name, dtype, quantization)  # type: ignore[arg-type]
    driver, calls = Driver(model, captures=False), record_operator_calls(monkeypatch)
    one, other = driver.start(), driver.start()
    for work in ([(one, [1, 2, 3])], [(one, [4]), (other, [5, 6])], [(one, [7])]):
        calls.clear()
        driver.step(work)
        head = 1  # the driver computes the logits of every row
        assert len(calls) == BESIDE_LAYERS + 5 * model.num_layers + head
