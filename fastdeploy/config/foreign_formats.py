# SPDX-License-Identifier: Apache-2.0
"""Folders and configurations that other tools made and this one does not read, each refused by its name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastdeploy.core.errors import ConfigError

_QUANTIZATION_NAMES = {
    "awq": "AWQ",
    "gptq": "GPTQ",
    "compressed-tensors": "compressed-tensors",
    "bitsandbytes": "bitsandbytes",
    "fp8": "FP8",
    "gguf": "GGUF",
    "modelopt": "ModelOpt",
}
_QUANTIZATION_FILES = {
    "quantize_config.json": "GPTQ",
    "quant_config.json": "AWQ",
    "hf_quant_config.json": "ModelOpt",
}
_ADAPTER_FILES = ("adapter_config.json", "lora_config.json")
_OTHER_MODALITIES = ("vision_config", "audio_config", "vision_tower", "mm_vision_tower", "talker_config")


def refuse_foreign_folder(directory: Path) -> None:
    """Refuse a folder that holds something else than a checkpoint, by the files that say so.

    Raises:
        ConfigError: an adapter, a quantized or a pre-sharded checkpoint; a folder with GGUF files and no config.json.
    """
    for file in _ADAPTER_FILES:
        if (directory / file).is_file():
            raise ConfigError("model", f"{directory} is an adapter (LoRA): {file}; adapters are not supported")
    for file, name in _QUANTIZATION_FILES.items():
        if (directory / file).is_file():
            raise ConfigError("model", f"{directory} is quantized with {name}: {file}; that is not supported")
    if (directory / "rank_0").is_dir():
        raise ConfigError(
            "model",
            f"{directory} is pre-sharded for tensor parallelism (rank_0/), which is not supported; "
            "use the checkpoint that it was made of",
        )
    if any(directory.glob("*.gguf")) and not (directory / "config.json").exists():
        raise ConfigError("model", f"{directory}: GGUF checkpoints are not supported")


def refuse_quantization(raw: Mapping[str, Any], where: str) -> None:
    """Refuse the config.json of a quantized checkpoint.

    Args:
        where: its folder, for the message.

    Raises:
        ConfigError: naming the method.
    """
    quantization = raw.get("quantization_config") or raw.get("compression_config")
    if not quantization:
        return
    found = quantization if isinstance(quantization, Mapping) else {}
    method = str(found.get("quant_method") or found.get("quantization") or "unknown")
    name = _QUANTIZATION_NAMES.get(method.lower())
    shown = f"'{method}'" if name in (None, method) else f"'{method}' ({name})"
    raise ConfigError("quantization_config", f"{where}checkpoints quantized with {shown} are not supported")


def describe_foreign_architecture(raw: Mapping[str, Any], name: Any) -> str:
    """Return what is not supported about an architecture that is not known."""
    key = next((key for key in _OTHER_MODALITIES if raw.get(key)), None)
    if key is not None:
        return f"{name!r} is multimodal ({key}), which is not supported"
    if isinstance(name, str) and name.endswith(("ForSequenceClassification", "ForTokenClassification", "RewardModel")):
        return f"{name!r} does not generate text, which is not supported"
    return f"{name!r} is not supported"
