# SPDX-License-Identifier: Apache-2.0
"""Formats and features of checkpoints that are not supported, each refused by its name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from fastdeploy.config.checkpoint_json import read_json_object
from fastdeploy.config.coded.awq_config import METHOD as AWQ
from fastdeploy.config.coded.awq_config import parse_awq
from fastdeploy.config.coded.compressed_tensors_config import METHOD as COMPRESSED_TENSORS
from fastdeploy.config.coded.compressed_tensors_config import parse_compressed_tensors
from fastdeploy.config.coded.fp8_config import FP8, parse_fp8
from fastdeploy.config.coded.gptq_config import METHOD as GPTQ
from fastdeploy.config.coded.gptq_config import parse_gptq
from fastdeploy.config.quantization import FORMATS, GGUF, MIXED, UNQUANTIZED, QuantizationConfig
from fastdeploy.config.refused_methods import ANY_CODES, instead_of
from fastdeploy.core.errors import ConfigError

_REFUSED_FILES = {
    "adapter_config.json": "is a LoRA adapter",
    "lora_config.json": "is a LoRA adapter",
    "rank_0/": "is sharded for tensor parallelism",
}
_QUANTIZED_FILES = {
    "hf_quant_config.json": ("ModelOpt", "modelopt"),
    "quant_model_description*.json": ("msmodelslim", "ascend"),
}
"""Pattern of a file's name -> the tool that writes it, and its quantization method."""
_QUANTIZATION_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
"""File that holds what quantization_config would, from before config.json had that key -> method of its writer."""
_QUANTIZATION_FILE = "quantization_config_file"  # key for the name of that file
_AWQ_KEYS = {"w_bit", "q_group_size"}  # of AutoAWQ, which some tools write to a file of the other name
_LINEAR_ATTENTION = "needs linear attention, which is not supported"
_INDEXED_ATTENTION = "needs latent attention with an indexer (index_topk), which is not supported"
_ARCHITECTURES = {
    "DeepseekV32": f"{_INDEXED_ATTENTION}; DeepSeek-V3.1 (DeepseekV3ForCausalLM) runs instead",
    "DeepseekV4": "needs compressed sparse attention and hyper-connections, which are not supported",
    "Ernie4_5_VL": "needs images and experts for each modality, which are not supported",
    "GlmMoeDsa": _INDEXED_ATTENTION,
    "GptOss": "needs attention sinks, experts with biases and MXFP4 weights, which are not supported",
    "KimiLinear": _LINEAR_ATTENTION,
    "Llama4": "needs attention in chunks and layers without rotary embedding, which are not supported",
    "MiniMax": _LINEAR_ATTENTION,
    "MiniMaxM2": "needs query and key norms over all heads, which are not supported",
    "MiniMaxM3": "needs images and sparse attention, which are not supported",
    "Qwen3Next": _LINEAR_ATTENTION,
    "Qwen3_5": _LINEAR_ATTENTION,
}
"""Beginning of an architecture's name -> what is missing; the longest beginning counts."""
_KIMI_K2 = "needs a tokenizer other than its tiktoken.model, which is not supported yet"
_OFFLINE_WEIGHT = ".quant_weight"
_QUANTIZED_TENSORS = {
    _OFFLINE_WEIGHT: "quantized offline by FastDeploy",
    ".weight_scale_inv": "in FP8 with a scale per block",
    ".weight_packed": "quantized with compressed-tensors",
    ".qweight": "quantized with GPTQ or AWQ",
    ".weight_scale": "quantized with a scale per tensor or channel",
}
"""End of a tensor's name -> how its layer is stored."""
_PARSERS: Mapping[str, Callable[[Mapping[str, Any], str], object]] = {AWQ: parse_awq, GPTQ: parse_gptq}
_OTHER_MODALITIES = ("vision_config", "audio_config", "vision_tower", "mm_vision_tower", "talker_config")


def refuse_foreign_folder(directory: Path) -> None:
    """Refuse a directory whose files show that it is not a supported checkpoint.

    Raises:
        ConfigError: an adapter, a sharded checkpoint, one that is quantized in a way that is not supported, or GGUF
            files without config.json.
    """
    for file, problem in _REFUSED_FILES.items():
        if (directory / file).exists():
            raise ConfigError("model", f"{directory} {problem} ({file}), which is not supported")
    for pattern, (tool, method) in _QUANTIZED_FILES.items():
        found = next(directory.glob(pattern), None)
        if found is not None:
            problem = f"is quantized with {tool} ({found.name}), which is not supported"
            raise ConfigError("model", f"{directory} {problem}; use {instead_of(method)}")
    if any(directory.glob("*.gguf")) and not (directory / "config.json").exists():
        raise ConfigError("model", f"{directory} has GGUF files and no config.json; give one of the files")


def with_quantization_file(raw: Mapping[str, Any], directory: Path) -> Mapping[str, Any]:
    """Return config.json with the content of quantize_config.json or quant_config.json if it says nothing itself.

    Raises:
        ConfigError: that file cannot be read.
    """
    if find_quantization(raw) is not None:
        return raw
    for file, method in _QUANTIZATION_FILES.items():
        found = read_json_object(directory / file, "model")
        if found:
            method = "awq" if _AWQ_KEYS & found.keys() else method
            return {**raw, "quantization_config": {"quant_method": method, **found}, _QUANTIZATION_FILE: file}
    return raw


def find_quantization(raw: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the `quantization_config` of config.json, which has an older name; None if there is none."""
    found = raw.get("quantization_config") or raw.get("compression_config")
    if not found:
        return None
    return found if isinstance(found, Mapping) else {}


def quantization_method(raw: Mapping[str, Any]) -> str:
    """Return how config.json says that weights are stored as codes: its `quant_method`, or "" if it has none."""
    return str((find_quantization(raw) or {}).get("quant_method") or "")


def read_quantization(raw: Mapping[str, Any], where: str) -> QuantizationConfig:
    """Return the formats that config.json asks for: in FastDeploy's way, or one for the codes of a checkpoint.

    FP8 weights are widened, so that there is no format for them. Other quantized checkpoints are refused.

    Raises:
        ConfigError: names the method, after `where`.
    """
    found = find_quantization(raw)
    if found is None:
        return UNQUANTIZED
    if _QUANTIZATION_FILE in raw:
        where = where.replace("config.json", str(raw[_QUANTIZATION_FILE]))
    stored = quantization_method(raw)
    if stored == GGUF:
        return QuantizationConfig.from_value(GGUF)
    if stored == COMPRESSED_TENSORS:
        parsed = parse_compressed_tensors(found, where)
        return QuantizationConfig.from_value(COMPRESSED_TENSORS) if parsed.has_integers else UNQUANTIZED
    if stored in _PARSERS:
        _PARSERS[stored](found, where)
        return QuantizationConfig.from_value(stored)
    if stored == FP8:
        parse_fp8(found, where)
        return UNQUANTIZED
    method = _method_of(found)
    if method in (MIXED, *FORMATS) and not _quantization_form(found) and not stored:
        try:
            return QuantizationConfig.from_value(found)
        except ConfigError as error:
            raise ConfigError("quantization_config", f"{where}{error}") from None
    raise ConfigError(
        "quantization_config",
        f"{where}checkpoints quantized with {method!r:.120}{_quantization_form(found)} are not supported; "
        f"use {instead_of(method)}",
    )


def quantization_notes(raw: Mapping[str, Any], where: str) -> tuple[str, ...]:
    """Return lines about what config.json says of codes, inputs and caches that is not used; it has been checked."""
    if quantization_method(raw) == COMPRESSED_TENSORS:
        return parse_compressed_tensors(find_quantization(raw) or {}, where).notes
    return ()


def _method_of(quantization: Mapping[str, Any]) -> str:
    """Return the name of a method; older versions of bitsandbytes tell it by their keys only."""
    if "load_in_4bit" in quantization or "load_in_8bit" in quantization:
        return "bitsandbytes"
    return str(quantization.get("quant_method") or quantization.get("quantization") or "unknown")


def _quantization_form(quantization: Mapping[str, Any]) -> str:
    """Return what a `quantization_config` says beside the method."""
    if quantization.get("format"):
        return f" ({quantization['format']!r:.60})"
    offline = next((key for key in ("is_quantized", "is_moe_quantized") if quantization.get(key)), None)
    return "" if offline is None else f" (offline by FastDeploy: {offline})"


def refuse_quantized_tensors(names: Collection[str], path: Path) -> None:
    """Refuse a file of weights whose tensors' names show that they are quantized, although config.json does not say so.

    Raises:
        ConfigError: names the form of the weights and one tensor.
    """
    for end, form in _QUANTIZED_TENSORS.items():
        name = next((name for name in names if name.endswith(end)), None)
        if name is not None:
            missing = "" if end == _OFFLINE_WEIGHT else " without a quantization_config in config.json"
            problem = f"weights {form} ({name:.120}) are not supported{missing}"
            raise ConfigError("model", f"{path}: {problem}; use {ANY_CODES}")


def describe_foreign_variant(raw: Mapping[str, Any], name: Any) -> str:
    """Return why a model is not supported although its architecture may be; empty for others."""
    if raw.get("model_type") == "kimi_k2":
        return f"{name!r:.120} of model_type 'kimi_k2' {_KIMI_K2}"
    if name == "DeepseekV3ForCausalLM" and raw.get("index_topk") is not None:  # of DeepSeek-V3.2, under another name
        return f"{name!r} {_ARCHITECTURES['DeepseekV32']}"
    return ""


def describe_foreign_architecture(raw: Mapping[str, Any], name: Any) -> str:
    """Return why an unknown architecture is not supported."""
    beginnings = [beginning for beginning in _ARCHITECTURES if isinstance(name, str) and name.startswith(beginning)]
    if beginnings:
        return f"{name!r:.120} {_ARCHITECTURES[max(beginnings, key=len)]}"
    key = next((key for key in _OTHER_MODALITIES if raw.get(key)), None)
    if key is not None:
        return f"{name!r:.120} is multimodal ({key}), which is not supported"
    if isinstance(name, str) and name.endswith(("ForSequenceClassification", "ForTokenClassification", "RewardModel")):
        return f"{name!r:.120} does not generate text, which is not supported"
    return f"{name!r:.120} is not supported"


def refuse_unsupported_features(raw: Mapping[str, Any]) -> None:
    """Refuse features that change the computation and are not supported.

    Raises:
        ConfigError: names the key of config.json.
    """
    activation = raw.get("hidden_act")
    if activation not in (None, "silu", "swish"):
        raise ConfigError("hidden_act", f"activation '{activation}' is not supported (supported: silu)")
    for key, neutral in (
        ("compression_ratio", 1.0),
        ("attn_logit_softcapping", None),
        ("final_logit_softcapping", None),
        ("alibi", False),
        ("use_rmsnorm", True),
        ("use_long_sequence_strategies", False),
    ):
        if raw.get(key, neutral) not in (neutral, None):
            raise ConfigError(key, f"only {neutral} is supported, got {raw[key]!r:.100}")
