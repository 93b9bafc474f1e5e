# SPDX-License-Identifier: Apache-2.0
"""The drafting models of the demonstration model, by their methods."""

from __future__ import annotations

from fastdeploy.config.speculative_config import METHODS

HEADS = {"eagle": "demo/eagle", "eagle3": "demo/eagle3", "mlp_speculator": "demo/mlp", "medusa": "demo/medusa"}
DRAFTING_MODELS = {"draft_model": "demo/draft", **HEADS}
SERVED_METHODS = [method for method in METHODS if method == "eagle3" or method not in HEADS]
"""Methods for tests of what servers answer, where one trained head stands for all."""


def speculation(method: str, **keys: object) -> dict[str, object]:
    """Return a mapping for a method, with its drafting model."""
    model = {"model": DRAFTING_MODELS[method]} if method in DRAFTING_MODELS else {}
    return {"method": method, **model, **keys}
