# SPDX-License-Identifier: Apache-2.0
"""Weights in GPTQ's layouts `gptq` and `gptq_v2`: codes of four or eight bits [in / codes of a word, out], and g_idx.

Only g_idx tells whether inputs were reordered. If it rises, groups are consecutive, whatever `desc_act` says.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastdeploy.config.coded.gptq_config import parse_gptq
from fastdeploy.models.coded.word_module import WordLayout, WordModule, check_is_quantized, modules_with_codes
from fastdeploy.models.weight_source import SafetensorsSource
from fastdeploy.ops.code_words import Order


def find_gptq(quantization: Mapping[str, Any], files: SafetensorsSource) -> dict[str, WordModule]:
    """Return the modules with codes by the names of their weights.

    Raises:
        ConfigError: config.json and the files contradict each other, or tensors are missing or of wrong shapes.
    """
    config, modules = parse_gptq(quantization, f"{files.directory}/config.json: "), dict[str, WordModule]()
    for name in modules_with_codes(files):
        check_is_quantized(name, config.rules.plain_by(name), files)
        scheme = config.scheme_of(name)
        layout = WordLayout(
            method="GPTQ",
            num_bits=scheme.bits,
            order=Order.ALONG_INPUTS,
            zero_order=Order.ALONG_OUTPUTS,
            zeros_minus_one=config.stores_zeros_minus_one,
            group_size=scheme.group_size,
            is_symmetric=scheme.is_symmetric,
            is_reordered=scheme.is_reordered,
            has_short_group=True,
        )
        modules[f"{name}.weight"] = WordModule(name, layout, files)
    return modules
