# SPDX-License-Identifier: Apache-2.0
"""The `quantization_config` of checkpoints in FP8 with a scale per block, as DeepSeek-V3 and Qwen3-FP8 have it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from fastdeploy.core.errors import ConfigError

FP8 = "fp8"
BLOCK = (128, 128)  # outputs and inputs that share a scale
_FLOAT_SCALES = (None, "float", "ue8m0")  # ue8m0: powers of two, which are stored as other scales are
_PLAIN_MODULES = ("modules_to_not_convert", "ignored_layers")
_INSTEAD = (
    "use FP8 with a scale per block of 128 x 128 or per output (compressed-tensors), or plain weights with "
    "--quantization w8a8"
)


@dataclass(frozen=True)
class Fp8Config:
    """What config.json says of FP8 weights.

    Attributes:
        plain_modules: names of modules whose weights are not in FP8; files are what decides.
    """

    plain_modules: frozenset[str]


def parse_fp8(quantization: Mapping[str, Any], where: str) -> Fp8Config:
    """Read a `quantization_config` with quant_method fp8.

    Scales of activations are not read, so that `activation_scheme` has no effect.

    Args:
        where: what messages begin with.

    Raises:
        ConfigError: codes of another format, or scales for other blocks; says what to use instead.
    """

    def refuse(problem: str) -> NoReturn:
        raise ConfigError("quantization_config", f"{where}{problem}; {_INSTEAD}")

    code_format = quantization.get("fmt")
    if code_format not in (None, "e4m3"):
        refuse(f"FP8 weights of fmt {code_format!r:.40} are not supported, only e4m3")
    block = quantization.get("weight_block_size")
    if block is None:
        refuse("FP8 weights with a scale per tensor (quant_method 'fp8' without weight_block_size) are not supported")
    if block != list(BLOCK):
        refuse(f"FP8 weights with a scale per block of {block!r:.40} are not supported, only {list(BLOCK)}")
    if quantization.get("scale_fmt") not in _FLOAT_SCALES:
        refuse(f"scale_fmt {quantization['scale_fmt']!r:.40} of FP8 weights is not supported, only float and ue8m0")
    if quantization.get("expert_dtype") not in (None, FP8):
        refuse(f"experts of expert_dtype {quantization['expert_dtype']!r:.40} are not supported, only fp8")
    return Fp8Config(frozenset(name for key in _PLAIN_MODULES for name in _names(quantization, key, where)))


def _names(quantization: Mapping[str, Any], key: str, where: str) -> list[str]:
    names = quantization.get(key)
    if names is None:
        return []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError("quantization_config", f"{where}{key}: expected a list of names, got {names!r:.80}")
    return names
