# SPDX-License-Identifier: Apache-2.0
"""Weights in AWQ's layout `gemm`: codes of four bits [in, out / 8], zeros as they are, groups without a remainder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastdeploy.config.coded.awq_config import parse_awq
from fastdeploy.models.coded.word_module import WordLayout, WordModule, check_is_quantized, modules_with_codes
from fastdeploy.models.weight_source import SafetensorsSource
from fastdeploy.ops.code_words import Order


def find_awq(quantization: Mapping[str, Any], files: SafetensorsSource) -> dict[str, WordModule]:
    """Return the modules with codes by the names of their weights.

    Raises:
        ConfigError: config.json and the files contradict each other, or tensors are missing or of wrong shapes.
    """
    config, modules = parse_awq(quantization, f"{files.directory}/config.json: "), dict[str, WordModule]()
    for name in modules_with_codes(files):
        check_is_quantized(name, config.rules.plain_by(name), files)
        layout = WordLayout(
            method="AWQ",
            num_bits=4,
            order=Order.AWQ,
            zero_order=Order.AWQ,
            zeros_minus_one=False,
            group_size=config.group_size_of(name),
            is_symmetric=None if config.has_zero_points else True,
            is_reordered=False,
            has_short_group=False,
        )
        modules[f"{name}.weight"] = WordModule(name, layout, files)
    return modules
