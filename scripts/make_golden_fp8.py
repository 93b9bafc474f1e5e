# SPDX-License-Identifier: Apache-2.0
"""Write the tiny checkpoints in FP8 under tests/golden/fp8/, with values computed by torch and `transformers`.

Run in an environment with torch and transformers 5 (neither is needed to run the tests):

    python scripts/make_golden_fp8.py

Codes and scales are written as DeepSeek-V3 defines them: the scale of a block of 128 x 128 is its largest magnitude
divided by 448, and a weight is code * scale, computed in float32. The embedding, the norms, the router, the head and
the projection of the MTP layer are plain. Each folder has config.json, model.safetensors and reference.npz:
    tokens             [T] int32
    logprobs_float32   [T, V] float32, of transformers with the dequantized weights
    digest.NAME        hash of each tensor, dequantized, in bfloat16
codes.npz has codes and scales, and hashes of their products in float32 and bfloat16: of each code with each scale, and
of a random matrix in blocks and with a scale per output (`float-quantized` of compressed-tensors).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from make_golden_checkpoints import write_json
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

GOLDEN = Path(__file__).resolve().parent.parent / "tests" / "golden" / "fp8"
BLOCK, LARGEST = 128, 448.0
NUM_TOKENS = 24
SMALL = {
    **{"vocab_size": 96, "hidden_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16},
    **{"num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": False},
}
QWEN3 = {
    **{**SMALL, "model_type": "qwen3", "hidden_size": 132, "intermediate_size": 140, "num_hidden_layers": 1},
    "tie_word_embeddings": True,
}
GLM4_MOE = {
    **{**SMALL, "model_type": "glm4_moe", "intermediate_size": 136, "moe_intermediate_size": 128},
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1},
    **{"use_qk_norm": True, "attention_bias": True, "norm_topk_prob": True},
}
PLAIN = ("norm", "embed_tokens", "lm_head", "mlp.gate.", "e_score", "eh_proj", "shared_head.head")
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Fp8Golden:
    """One checkpoint to write.

    Attributes:
        scale_fmt: ue8m0 for scales that are powers of two.
        is_per_output: whether an output has one scale, in the layout of compressed-tensors.
        has_mtp: whether there is a layer for multi-token prediction, whose values are not checked by a reference.
    """

    name: str
    config: dict[str, Any]
    scale_fmt: str = ""
    is_per_output: bool = False
    has_mtp: bool = False


GOLDENS = (
    Fp8Golden("qwen3", QWEN3, scale_fmt="ue8m0"),
    Fp8Golden("qwen3_per_output", QWEN3, is_per_output=True),
    Fp8Golden("glm4_moe", GLM4_MOE, has_mtp=True),
)


def draw(name: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    """Return random bfloat16 values under which every part of the model moves the logits."""
    noise = torch.randn(shape, generator=generator)
    if "norm" in name:
        value = 1.0 + 0.2 * noise
    elif "e_score" in name:
        value = 0.05 * noise
    else:
        value = 0.3 * noise if len(shape) == 1 else noise / shape[-1] ** 0.5
    return value.to(torch.bfloat16)


def blocks_of(scales: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Return the scale of each element of a matrix, or of a stack of them."""
    if scales.shape[-2] == shape[-2]:
        return scales.float()
    per_row = scales.float().repeat_interleave(BLOCK, -2)[..., : shape[-2], :]
    return per_row.repeat_interleave(BLOCK, -1)[..., : shape[-1]]


def quantize(values: torch.Tensor, golden: Fp8Golden) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes and scales of a matrix, or of a stack of them."""
    if golden.is_per_output:
        scales = (values.float().abs().amax(dim=-1, keepdim=True) / LARGEST).to(torch.bfloat16)
        codes = (values.float() / scales.float()).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
        return codes, scales
    *stack, rows, inputs = values.shape
    padded = torch.zeros(*stack, -(-rows // BLOCK) * BLOCK, -(-inputs // BLOCK) * BLOCK)
    padded[..., :rows, :inputs] = values.float()
    blocks = padded.unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, BLOCK))
    scales = blocks.abs().amax(dim=(-3, -1)) / LARGEST
    if golden.scale_fmt == "ue8m0":
        scales = torch.exp2(torch.ceil(torch.log2(scales)))
    codes = (values.float() / blocks_of(scales, values.shape)).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return codes, scales


def dequantize(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return code * scale in float32."""
    return codes.float() * blocks_of(scales, codes.shape)


def bits_of(values: torch.Tensor) -> np.ndarray:
    """Return the bits of values that are rounded to bfloat16."""
    bits: np.ndarray = values.to(torch.bfloat16).contiguous().view(torch.int16).numpy().view(np.uint16)
    return bits


def digest(values: np.ndarray) -> np.ndarray:
    return np.array(hashlib.blake2b(values.tobytes(), digest_size=8).hexdigest())


def mtp_layer(config: Any, generator: torch.Generator, like: Tensors) -> Tensors:
    """Return random tensors of a layer for multi-token prediction."""
    last = config.num_hidden_layers
    prefix, block = f"model.layers.{last}.", f"model.layers.{last - 1}."
    shapes = {prefix + name.removeprefix(block): value.shape for name, value in like.items() if name.startswith(block)}
    hidden = config.hidden_size
    shapes |= {f"{prefix}{name}.weight": torch.Size([hidden]) for name in ("enorm", "hnorm", "shared_head.norm")}
    shapes[f"{prefix}eh_proj.weight"] = torch.Size([hidden, 2 * hidden])
    return {name: draw(name, shape, generator) for name, shape in shapes.items()}


def stored_names(name: str, values: torch.Tensor) -> Tensors:
    """Return the tensors as which files store one of transformers' module, in which experts are stacked."""
    if values.ndim < 3:
        return {name: values}
    prefix, _, part = name.rpartition(".")
    parts = ("gate_proj", "up_proj") if part == "gate_up_proj" else ("down_proj",)
    return {
        f"{prefix}.{expert}.{key}.weight": matrix
        for expert, stacked in enumerate(values)
        for key, matrix in zip(parts, stacked.chunk(len(parts)), strict=True)
    }


@torch.no_grad()
def write_checkpoint(golden: Fp8Golden) -> None:
    """Write one folder."""
    generator = torch.Generator().manual_seed(len(golden.name))
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**golden.config), attn_implementation="eager").eval()
    drawn: Tensors = {
        name: draw(name, values.shape, generator)
        for name, values in model.state_dict().items()
        if name != "lm_head.weight" or not golden.config["tie_word_embeddings"]
    }
    tensors: Tensors = {}
    for name, values in drawn.items():
        tensors |= stored_names(name, values)
    if golden.has_mtp:
        tensors |= mtp_layer(model.config, generator, tensors)
    stored: Tensors = {}
    plain: Tensors = {}  # as a checkpoint that is not quantized has them
    for name, values in tensors.items():
        if values.ndim == 1 or any(part in name for part in PLAIN):
            stored[name] = plain[name] = values
            continue
        codes, scales = quantize(values, golden)
        stored[name], stored[f"{name}_scale" if golden.is_per_output else f"{name}_scale_inv"] = codes, scales
        plain[name] = dequantize(codes, scales)
    folder = GOLDEN / golden.name
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads(model.config.to_json_string(use_diff=True))
    config |= {"architectures": [type(model).__name__], "dtype": "bfloat16"}
    config["quantization_config"] = quantization_config(golden)
    write_json(folder / "config.json", config | {"eos_token_id": 2})
    save_file(
        {name: value.contiguous() for name, value in stored.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    np.savez_compressed(folder / "reference.npz", **reference(model, drawn, plain))


def quantization_config(golden: Fp8Golden) -> dict[str, Any]:
    if golden.is_per_output:
        codes = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "strategy": "channel"}
        inputs = {**codes, "dynamic": True, "strategy": "token"}
        group = {"targets": ["Linear"], "weights": codes, "input_activations": inputs, "output_activations": None}
        quantization = {"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"]}
        return {**quantization, "config_groups": {"group_0": group}, "quantization_status": "compressed"}
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]}
    quantization |= {"activation_scheme": "dynamic", "modules_to_not_convert": ["lm_head"]}
    return quantization | ({"scale_fmt": golden.scale_fmt} if golden.scale_fmt else {})


def reference(model: Any, drawn: Tensors, plain: Tensors) -> dict[str, np.ndarray]:
    """Return log-probabilities of a model with the dequantized weights, and digests of these in bfloat16."""
    state = {name: merged(name, plain) for name in drawn}
    model.load_state_dict({name: value.float() for name, value in state.items()}, strict=False)
    tokens = torch.randint(0, model.config.vocab_size, (1, NUM_TOKENS), generator=torch.Generator().manual_seed(1))
    values = {
        "tokens": tokens[0].numpy().astype(np.int32),
        "logprobs_float32": model(tokens, use_cache=False).logits[0].log_softmax(-1).numpy(),
    }
    for name, value in plain.items():
        values[f"digest.{name}"] = digest(bits_of(value))
    return values


def merged(name: str, plain: Tensors) -> torch.Tensor:
    """Return a tensor of transformers' module, in which the experts of a layer are stacked."""
    if ".experts." not in name:
        return plain[name]
    prefix, _, part = name.rpartition(".")
    parts = ("gate_proj", "up_proj") if part == "gate_up_proj" else ("down_proj",)
    count = len({key for key in plain if key.startswith(f"{prefix}.") and key.endswith(f".{parts[0]}.weight")})
    return torch.stack(
        [torch.cat([plain[f"{prefix}.{expert}.{key}.weight"] for key in parts]) for expert in range(count)]
    )


def write_codes() -> None:
    """Write digests of products of all codes that are numbers with scales at the ends of float32, and of a matrix."""
    codes = np.array([code for code in range(256) if code & 0x7F != 0x7F], np.uint8)
    scales = np.array([1.0, 1e-3, 0.7, 1.4e-45, 1e-40, 1.1754944e-38, 1e-36, 2.0**-120, 7.5e35], np.float32)
    products = values_of(codes)[None] * torch.tensor(scales)[:, None]
    random = np.random.default_rng(3)
    matrix, block_scales = random.choice(codes, (200, 300)), random.random((2, 3), np.float32)
    channel_scales = random.random((200, 1), np.float32)
    in_blocks = values_of(matrix) * blocks_of(torch.tensor(block_scales), torch.Size(matrix.shape))
    np.savez_compressed(
        GOLDEN / "codes.npz",
        codes=codes,
        scales=scales,
        float32=digest(products.view(torch.int32).numpy()),
        bfloat16=digest(bits_of(products)),
        ragged=digest(bits_of(in_blocks)),
        channel=digest(bits_of(values_of(matrix) * torch.tensor(channel_scales))),
    )


def values_of(codes: np.ndarray) -> torch.Tensor:
    """Return the values of codes in float32."""
    return torch.tensor(codes).view(torch.float8_e4m3fn).float()


def main() -> None:
    for golden in GOLDENS:
        write_checkpoint(golden)
    write_codes()
    print(f"{sum(file.stat().st_size for file in GOLDEN.rglob('*') if file.is_file()) / 1024:.0f} kB")


if __name__ == "__main__":
    main()
