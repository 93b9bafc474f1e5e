# SPDX-License-Identifier: Apache-2.0
"""Write the tiny AWQ and GPTQ checkpoints under tests/golden/awq_gptq/, with references computed by `transformers`.

Run in an environment with torch and transformers 5 (neither is needed to run the tests):

    python scripts/make_awq_gptq.py

Each model has random weights, which are rounded to the nearest code. Words are packed from the formats' definitions.
The reference is what transformers computes in float32 with the dequantized weights:
    tokens    [T] int32
    rows      [R] int32       rows whose log-probabilities are stored
    logprobs  [R, V] float32
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

FOLDER = Path(__file__).resolve().parent.parent / "tests" / "golden" / "awq_gptq"
VOCAB, NUM_TOKENS, ROWS = 64, 24, (0, 5, 12, 23)
AWQ_ORDER, IN_ORDER = (0, 2, 4, 6, 1, 3, 5, 7), tuple(range(8))
CLASSES: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
}
BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "bos_token_id": 62,
    "eos_token_id": 63,
}
MOE = {
    **{"num_hidden_layers": 2, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    **{"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [0]},
}
LONG = {"intermediate_size": 576}


def awq(group_size: int, **keys: Any) -> dict[str, Any]:
    """Return a quantization_config of AutoAWQ."""
    config = {"bits": 4, "group_size": group_size, "quant_method": "awq", "version": "gemm", "zero_point": True}
    return {**config, "modules_to_not_convert": None, **keys}


def gptq(bits: int, group_size: int, sym: bool, layout: str = "gptq", **keys: Any) -> dict[str, Any]:
    """Return a quantization_config of GPTQModel."""
    config = {"bits": bits, "group_size": group_size, "sym": sym, "desc_act": False, "lm_head": False}
    return {**config, "quant_method": "gptq", "checkpoint_format": layout, "pack_dtype": "int32", **keys}


@dataclass(frozen=True)
class Model:
    """A model to write.

    Attributes:
        family: a key of CLASSES.
        config: keys of its config.json beside BASE.
        is_symmetric: whether all zeros are half of the number of codes.
        scale_dtype: of scales in the file.
        plain: expression of the names of modules that are not quantized.
    """

    name: str
    family: str
    config: dict[str, Any]
    quantization: dict[str, Any]
    is_symmetric: bool = False
    scale_dtype: torch.dtype = torch.float16
    plain: str = r"lm_head|.*\.gate"


MODELS = (
    Model("awq_64", "llama", {**LONG, "mlp_bias": True}, awq(64)),
    Model("awq_32_bias", "qwen2", {"tie_word_embeddings": False}, awq(32)),
    Model("awq_128_symmetric", "llama", {"intermediate_size": 256}, awq(128, zero_point=False), True),
    Model("awq_experts", "qwen3_moe", MOE, awq(32, modules_to_not_convert=["gate"])),
    Model("awq_rows_bf16", "llama", {}, awq(-1), scale_dtype=torch.bfloat16),
    Model("gptq_128_short_group", "llama", LONG, gptq(4, 128, True), True),
    Model("gptq_64_bias", "qwen2", {"intermediate_size": 192}, gptq(4, 64, False, "gptq_v2")),
    Model(
        "gptq_int8_32_head",
        "llama",
        {"tie_word_embeddings": False, "attention_bias": True},
        gptq(8, 32, False, lm_head=True),
        plain="nothing",
    ),
    Model("gptq_int8_rows", "qwen2", {}, gptq(8, -1, True), True),
    Model("gptq_rows", "llama", {}, gptq(4, -1, False)),
    Model("gptq_reordered", "llama", {}, gptq(4, 32, False, desc_act=True)),
    Model("gptq_int8_reordered", "llama", {}, gptq(8, 32, True, "gptq_v2", desc_act=True), True),
    Model(
        "gptq_experts",
        "qwen3_moe",
        MOE,
        gptq(4, 32, True, dynamic={r"-:.*\.mlp\.gate$": {}, r".*\.experts\.\d+\.down_proj": {"bits": 8}}),
        True,
    ),
)


def random_model(model: Model, seed: int) -> PreTrainedModel:
    """Return a model of transformers with random weights in fp16."""
    config_class, model_class = CLASSES[model.family]
    config = config_class(**{**BASE, **model.config})
    config._experts_implementation = "eager"
    torch.manual_seed(seed)
    found = model_class(config).eval()
    with torch.no_grad():
        for name, parameter in found.named_parameters():
            is_norm = "norm" in name
            scale = 0.1 if parameter.ndim == 1 else 1.5 * parameter.shape[-1] ** -0.5
            values = torch.randn(parameter.shape) * scale + (1.0 if is_norm else 0.0)
            parameter.copy_(values.half().float())
    return found


def pack(values: torch.Tensor, bits: int, dim: int, order: tuple[int, ...]) -> torch.Tensor:
    """Pack codes into int32 along a dimension: the i-th bits of a word hold the value at order[i]."""
    per_word, moved = 32 // bits, values.long().movedim(dim, -1)
    parts = moved.reshape(*moved.shape[:-1], -1, per_word)
    words = sum(parts[..., order[i]] << (bits * i) for i in range(per_word))
    signed = torch.where(words >= 2**31, words - 2**32, words)
    return signed.to(torch.int32).movedim(-1, dim).contiguous()


def quantize(
    weight: torch.Tensor, model: Model, keys: dict[str, Any], seed: int
) -> tuple[dict[str, Any], torch.Tensor]:
    """Return the tensors of a module, and the dequantized weight [out, in]."""
    num_outputs, num_inputs = weight.shape
    bits, size = keys["bits"], keys["group_size"] if keys["group_size"] > 0 else num_inputs
    size = min(size, num_inputs)
    generator = torch.Generator().manual_seed(seed)
    groups = torch.arange(num_inputs) // size
    if keys.get("desc_act"):
        groups = groups[torch.randperm(num_inputs, generator=generator)]
    num_groups, most = int(groups.max()) + 1, 2**bits - 1
    scales, zeros = torch.empty(num_groups, num_outputs), torch.empty(num_groups, num_outputs)
    for group in range(num_groups):
        values = weight[:, groups == group]
        low, high = values.amin(1).clamp(max=0), values.amax(1).clamp(min=0)
        if model.is_symmetric:
            scales[group], zeros[group] = 2 * values.abs().amax(1) / most, (most + 1) // 2
        else:
            scales[group] = (high - low) / most
            zeros[group] = torch.round(-low / scales[group]).clamp(0, most)
    scales = scales.to(model.scale_dtype)
    scale_of, zero_of = scales.float()[groups], zeros[groups]  # [in, out]
    codes = torch.clamp(torch.round(weight.T / scale_of) + zero_of, 0, most)
    stored = {"scales": scales}
    if model.quantization["quant_method"] == "awq":
        stored |= {"qweight": pack(codes, 4, 1, AWQ_ORDER), "qzeros": pack(zeros, 4, 1, AWQ_ORDER)}
    else:
        words = pack(zeros, bits, 1, IN_ORDER).long()
        if model.quantization["checkpoint_format"] == "gptq":
            words = words - (0x11111111 if bits == 4 else 0x01010101)
        words = torch.where(words < -(2**31), words + 2**32, words).to(torch.int32)
        stored |= {"qweight": pack(codes, bits, 0, IN_ORDER), "qzeros": words, "g_idx": groups.to(torch.int32)}
    return stored, ((codes - zero_of) * scale_of).T.contiguous()


def stored_layers(model: Model, found: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the weights of the linear layers as views, by the names of their modules; experts one by one."""
    layers: dict[str, torch.Tensor] = {}
    for name, parameter in found.named_parameters():
        if name.endswith("experts.gate_up_proj"):
            for expert, both in enumerate(parameter.data):
                half = len(both) // 2
                layers[name.replace("gate_up_proj", f"{expert}.gate_proj")] = both[:half]
                layers[name.replace("gate_up_proj", f"{expert}.up_proj")] = both[half:]
        elif name.endswith("experts.down_proj"):
            layers |= {name.replace("down_proj", f"{i}.down_proj"): one for i, one in enumerate(parameter.data)}
        elif parameter.ndim == 2 and "embed" not in name:
            layers[name.removesuffix(".weight")] = parameter.data
    return layers


def write(model: Model, seed: int) -> int:
    """Write a model and its reference; return the bytes of both."""
    found, tensors = random_model(model, seed), dict[str, torch.Tensor]()
    layers = stored_layers(model, found)
    with torch.no_grad():
        for index, (name, weight) in enumerate(layers.items()):
            if re.fullmatch(model.plain, name):
                tensors[f"{name}.weight"] = weight.half()
                continue
            keys = dict(model.quantization)
            for pattern, overrides in (keys.get("dynamic") or {}).items():
                keys |= overrides if re.match(pattern.removeprefix("-:"), name) else {}
            stored, wide = quantize(weight, model, keys, 1000 * seed + index)
            weight.copy_(wide)
            tensors |= {f"{name}.{part}": value for part, value in stored.items()}
        for name, parameter in found.named_parameters():
            if ".experts." not in name and name.removesuffix(".weight") not in layers:
                tensors[name] = parameter.half()
        tokens = torch.randint(0, VOCAB - 2, (1, NUM_TOKENS), generator=torch.Generator().manual_seed(seed))
        logprobs = torch.log_softmax(found(tokens).logits[0].double(), -1)[list(ROWS)]
    folder = FOLDER / model.name
    folder.mkdir(parents=True, exist_ok=True)
    config = {**found.config.to_diff_dict(), "quantization_config": model.quantization, "torch_dtype": "float16"}
    config.pop("dtype", None)
    config["architectures"] = [type(found).__name__]
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    tensors = {name: value.detach().clone().contiguous() for name, value in tensors.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    np.savez_compressed(
        folder / "reference.npz",
        tokens=tokens[0].numpy().astype(np.int32),
        rows=np.asarray(ROWS, np.int32),
        logprobs=logprobs.float().numpy(),
    )
    return sum(path.stat().st_size for path in folder.iterdir())


if __name__ == "__main__":
    sizes = {model.name: write(model, seed) for seed, model in enumerate(MODELS)}
    print(sizes, sum(sizes.values()))
