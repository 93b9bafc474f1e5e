# SPDX-License-Identifier: Apache-2.0
"""Checkpoint formats that are not supported, each refused by its name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastdeploy.core.errors import ConfigError

_REFUSED_FILES = {
    "adapter_config.json": "is a LoRA adapter",
    "lora_config.json": "is a LoRA adapter",
    "quantize_config.json": "is quantized with GPTQ",
    "quant_config.json": "is quantized with AWQ",
    "hf_quant_config.json": "is quantized with ModelOpt",
    "rank_0/": "is sharded for tensor parallelism",
}
_OTHER_MODALITIES = ("vision_config", "audio_config", "vision_tower", "mm_vision_tower", "talker_config")


def refuse_foreign_folder(directory: Path) -> None:
    """Refuse a directory whose files show that it is not a supported checkpoint.

    Raises:
        ConfigError: an adapter, a quantized or a sharded checkpoint, or GGUF files without config.json.
    """
    for file, problem in _REFUSED_FILES.items():
        if (directory / file).exists():
            raise ConfigError("model", f"{directory} {problem} ({file}), which is not supported")
    if any(directory.glob("*.gguf")) and not (directory / "config.json").exists():
        raise ConfigError("model", f"{directory}: GGUF checkpoints are not supported")


def refuse_quantization(raw: Mapping[str, Any], where: str) -> None:
    """Refuse the config.json of a quantized checkpoint.

    Raises:
        ConfigError: names the method, after `where`.
    """
    quantization = raw.get("quantization_config") or raw.get("compression_config")
    if not quantization:
        return
    found = quantization if isinstance(quantization, Mapping) else {}
    method = str(found.get("quant_method") or found.get("quantization") or "unknown")
    raise ConfigError("quantization_config", f"{where}checkpoints quantized with {method!r:.120} are not supported")


def describe_foreign_architecture(raw: Mapping[str, Any], name: Any) -> str:
    """Return why an unknown architecture is not supported."""
    key = next((key for key in _OTHER_MODALITIES if raw.get(key)), None)
    if key is not None:
        return f"{name!r:.120} is multimodal ({key}), which is not supported"
    if isinstance(name, str) and name.endswith(("ForSequenceClassification", "ForTokenClassification", "RewardModel")):
        return f"{name!r:.120} does not generate text, which is not supported"
    return f"{name!r:.120} is not supported"
