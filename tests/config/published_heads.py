# SPDX-License-Identifier: Apache-2.0
"""Names and shapes of the tensors of published draft heads, and what their config.json says about them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from tests.config.torch_writer import ITEM_BYTES, Stored, write_torch_file

Shapes = dict[str, tuple[int, ...]]
DTYPES = {"d2t": "I64", "t2d": "BOOL", "token_map": "I64"}


@dataclass(frozen=True)
class Head:
    """A published head.

    Attributes:
        num_drafts: how many drafts the folder itself says that the head makes.
    """

    method: str
    shapes: Shapes
    config: dict[str, Any] = field(default_factory=dict)
    num_drafts: int | None = None


def layer(prefix: str, hidden: int, inner: int, keys: int, *norms: str, inputs: int = 0) -> Shapes:
    """Return a layer of Llama: its matrices and these norms, and that before the feed-forward part."""
    inputs = inputs or hidden
    norms = (*norms, "post_attention_layernorm")
    return {
        f"{prefix}.self_attn.q_proj.weight": (hidden, inputs),
        f"{prefix}.self_attn.k_proj.weight": (keys, inputs),
        f"{prefix}.self_attn.v_proj.weight": (keys, inputs),
        f"{prefix}.self_attn.o_proj.weight": (hidden, hidden),
        f"{prefix}.mlp.gate_proj.weight": (inner, hidden),
        f"{prefix}.mlp.up_proj.weight": (inner, hidden),
        f"{prefix}.mlp.down_proj.weight": (hidden, inner),
        **{f"{prefix}.{norm}.weight": (hidden,) for norm in norms},
    }


def eagle3(prefix: str, hidden: int, inner: int, keys: int, taps: int = 3) -> Shapes:
    """Return the tensors of a head for EAGLE 3 with a vocabulary of its own."""
    norms = layer(prefix, hidden, inner, keys, "input_layernorm", "hidden_norm", inputs=2 * hidden)
    own = {"norm.weight": (hidden,), "lm_head.weight": (32_000, hidden), "d2t": (32_000,), "t2d": (128_256,)}
    return {"fc.weight": (hidden, taps * hidden), **norms, **own}


def block_head(num_layers: int, taps: int, **more: tuple[int, ...]) -> Shapes:
    """Return the tensors of a head that drafts a block in one pass, for Qwen3-4B."""
    layers: Shapes = {}
    for index in range(num_layers):
        layers |= layer(f"layers.{index}", 2560, 9728, 1024, "input_layernorm")
        layers |= {f"layers.{index}.self_attn.{norm}.weight": (128,) for norm in ("q_norm", "k_norm")}
    return {"fc.weight": (2560, taps * 2560), "hidden_norm.weight": (2560,), "norm.weight": (2560,), **layers, **more}


def medusa(num_heads: int, prefix: str = "") -> Shapes:
    shapes: Shapes = {}
    for head in range(num_heads):
        shapes[f"{prefix}{head}.0.linear.weight"] = (4096, 4096)
        shapes[f"{prefix}{head}.0.linear.bias"] = (4096,)
        shapes[f"{prefix}{head}.1.weight"] = (32_000, 4096)
    return shapes


def mlp_speculator(num_predict: int, width: int) -> Shapes:
    """Return the tensors of a head for Llama 3 8B whose parts are not tied."""
    shapes: Shapes = {}
    for index in range(num_predict):
        shapes[f"speculator.emb.{index}.weight"] = (128_256, width)
        shapes[f"speculator.proj.{index}.weight"] = (width, width if index else 4096)
        shapes[f"speculator.head.{index}.weight"] = (128_256, width)
        shapes[f"speculator.ln.{index}.weight"] = shapes[f"speculator.ln.{index}.bias"] = (width,)
    return shapes


def speculators(kind: str, num_tokens: int) -> dict[str, Any]:
    """Return a config.json in the format of speculators."""
    proposal = {"proposal_type": "greedy", "speculative_tokens": num_tokens}
    verifier = {"name_or_path": "meta-llama/Llama-3.1-8B-Instruct", "architectures": ["LlamaForCausalLM"]}
    methods = {"algorithm": kind, "proposal_methods": [proposal], "default_proposal_method": "greedy"}
    return {
        "architectures": [f"{kind.title()}Speculator"],
        "speculators_model_type": kind,
        "speculators_config": {**methods, "verifier": verifier},
        "transformer_layer_config": {"model_type": "llama", "hidden_size": 4096},
    }


LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1}
EAGLE_LLAMA3 = {
    "embed_tokens.weight": (128_256, 4096),
    "fc.weight": (4096, 8192),
    **layer("layers.0", 4096, 14_336, 1024),
}
EAGLE_VICUNA = {
    "embed_tokens.weight": (32_000, 5120),
    "fc.weight": (5120, 10_240),
    "fc.bias": (5120,),
    **layer("layers.0", 5120, 13_824, 5120),
}
TWO_TAPS = eagle3("midlayer", 4096, 14_336, 1024, taps=2)
WITHOUT_TAPS = {name: shape for name, shape in eagle3("layers.0", 2048, 8192, 512).items() if name != "fc.weight"}
MEDUSA_OF_VLLM = {
    **{f"blocks.{head}.layers.0.weight": (4096, 4096) for head in range(3)},
    **{f"lm_heads.{head}.weight": (32_000, 4096) for head in range(3)},
}
MEDUSA_ON_ORIGINAL_HEAD = {
    **{f"blocks.{head}.layers.{part}.weight": (4096, 4096) for head in range(4) for part in range(2)},
    "lm_head.weight": (32_000, 4096),
    "token_map": (32_000,),
}
HYDRA = {
    **{f"hydra_mlp.{head}.0.linear.weight": (4096, (head + 2) * 4096) for head in range(4)},
    **{f"hydra_mlp.{head}.0.res_connection.weight": (4096, (head + 2) * 4096) for head in range(4)},
    **{f"hydra_lm_head.{head}.weight": (32_000, 4096) for head in range(4)},
}
HYDRA_WITH_PREFIX = {
    **{f"hydra_mlp.{head}.1.linear.weight": (4096, (head + 2) * 4096) for head in range(4)},
    **{f"hydra_lm_head.{head}.1.weight": (32_000, 4096) for head in range(4)},
    **layer("prefix_embeding_layer.layers.0", 4096, 11_008, 4096, "input_layernorm"),
    "prefix_embeding_layer.norm.weight": (4096,),
    "prefix_embeding_layer.embed_tokens.weight": (32_000, 4096),
}
TIED_MLP_SPECULATOR = {
    "speculator.emb.0.weight": (128_256, 3072),
    "speculator.proj.0.weight": (3072, 4096),
    "speculator.proj.1.weight": (3072, 3072),
    "speculator.head.0.weight": (128_256, 3072),
    "speculator.ln.0.weight": (3072,),
    "speculator.ln.0.bias": (3072,),
}
MTP_OF_DEEPSEEK = {
    "model.layers.61.eh_proj.weight": (7168, 14_336),
    "model.layers.61.enorm.weight": (7168,),
    "model.layers.61.hnorm.weight": (7168,),
    "model.layers.61.self_attn.o_proj.weight": (7168, 7168),
    "model.embed_tokens.weight": (129_280, 7168),
}
DECODER = {
    "model.embed_tokens.weight": (32_000, 768),
    **layer("model.layers.0", 768, 3072, 768, "input_layernorm"),
    "model.norm.weight": (768,),
    "lm_head.weight": (32_000, 768),
}
HEADS: dict[str, Head] = {
    "yuhuili/EAGLE-LLaMA3-Instruct-8B": Head("eagle", EAGLE_LLAMA3, LLAMA),
    "yuhuili/EAGLE-Vicuna-13B-v1.3": Head("eagle", EAGLE_VICUNA, LLAMA),
    "an EAGLE head converted for vLLM": Head(
        "eagle", {f"model.{name}": shape for name, shape in EAGLE_LLAMA3.items()}, {"model_type": "eagle"}
    ),
    "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B": Head("eagle3", eagle3("midlayer", 4096, 14_336, 1024), LLAMA),
    "RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3": Head(
        "eagle3", eagle3("layers.0", 4096, 14_336, 1024), speculators("eagle3", 3), 3
    ),
    "EAGLE 3 with five taps": Head("eagle3", eagle3("layers.0", 2560, 9728, 1024, taps=5), LLAMA),
    "EAGLE 3 with two taps": Head("eagle3", TWO_TAPS, LLAMA),
    "EAGLE 3 that reads the last state": Head("eagle3", WITHOUT_TAPS, LLAMA),
    "EAGLE 3 without a norm of the joined states": Head(
        "eagle3", {"fc.weight": (4096, 3 * 4096), **layer("layers.0", 4096, 14_336, 1024, "input_layernorm")}, LLAMA
    ),
    "joined states with a norm outside the layers, but none of keys": Head(
        "eagle3",
        {"fc.weight": (4096, 3 * 4096), "hidden_norm.weight": (4096,), **layer("layers.0", 4096, 64, 1024)},
        LLAMA,
    ),
    "EAGLE 3 for a wider target": Head(
        "eagle3", {**eagle3("midlayer", 2048, 8192, 512), "fc.weight": (2048, 3 * 5120)}, LLAMA
    ),
    "P-EAGLE": Head(
        "peagle",
        {
            **eagle3("layers.0", 4096, 14_336, 1024),
            **layer("layers.1", 4096, 14_336, 1024, "input_layernorm"),
            "mask_hidden": (1, 1, 12_288),
        },
        speculators("eagle3", 7),
        7,
    ),
    "z-lab/Qwen3-4B-DFlash-b16": Head("dflash", block_head(5, 5), {"model_type": "qwen3"}),
    "DFlash of speculators": Head(
        "dflash", block_head(5, 5, d2t=(32_000,), t2d=(151_936,)), speculators("dflash", 7), 7
    ),
    "DSpark": Head(
        "dspark",
        block_head(
            5, 5, **{"markov_head.markov_w1.weight": (151_936, 256), "markov_head.markov_w2.weight": (151_936, 256)}
        ),
        {"model_type": "qwen3"},
    ),
    "DSpark of one layer": Head(
        "dspark", block_head(1, 3, **{"markov_head.markov_w1.weight": (151_936, 256)}), speculators("dspark", 7), 7
    ),
    "ibm-ai-platform/llama3-8b-accelerator": Head(
        "mlp_speculator",
        mlp_speculator(4, 3072),
        {"architectures": ["MLPSpeculatorPreTrainedModel"], "model_type": "mlp_speculator", "n_predict": 4},
        4,
    ),
    "ibm-ai-platform/llama3-70b-accelerator": Head("mlp_speculator", TIED_MLP_SPECULATOR, {"n_predict": 4}, 4),
    "FasterDecoding/medusa-vicuna-7b-v1.3": Head(
        "medusa", medusa(5), {"medusa_num_heads": 2, "medusa_num_layers": 1}, 5
    ),
    "Medusa with a prefix": Head("medusa", medusa(4, "medusa_head."), LLAMA, 4),
    "Medusa within its model": Head("medusa", {**DECODER, **medusa(3, "medusa_heads.")}, LLAMA, 3),
    "Medusa of vLLM": Head("medusa", MEDUSA_OF_VLLM, {"model_type": "medusa", "num_heads": 5}, 3),
    "Medusa of vLLM on the original head": Head("medusa", MEDUSA_ON_ORIGINAL_HEAD, {"model_type": "medusa"}, 4),
    "ankner/hydra-vicuna-7b-v1.3": Head("hydra", HYDRA, {"hydra_num_heads": 4}),
    "Hydra++": Head("hydra", HYDRA_WITH_PREFIX, {"hydra_head_arch": "prefix-mlp"}),
    "a layer of DeepSeek-V3": Head("mtp", MTP_OF_DEEPSEEK, {"model_type": "deepseek_v3"}),
    "a layer of ERNIE 4.5": Head("mtp", {"model.mtp_emb_norm.0.weight": (8192,), "lm_head.weight": (103_424, 8192)}),
    "a layer of Qwen3-Next": Head(
        "mtp", {"mtp.fc.weight": (2048, 4096), **layer("mtp.layers.0", 2048, 512, 512, "input_layernorm")}
    ),
    "two joined vectors before a layer with a norm of its input": Head(
        "draft_model", {"fc.weight": (4096, 8192), **layer("layers.0", 4096, 64, 1024, "input_layernorm")}, LLAMA
    ),
    "a matrix before a layer that joins nothing": Head(
        "draft_model", {"fc.weight": (4096, 4096), **layer("layers.0", 4096, 64, 1024)}, LLAMA
    ),
    "a small decoder": Head("draft_model", DECODER, {"architectures": ["LlamaForCausalLM"]}),
    "a decoder whose name lies": Head("draft_model", DECODER, {"architectures": ["EagleLlamaForCausalLM"]}),
    "a decoder with a layer for MTP": Head(
        "draft_model", {**MTP_OF_DEEPSEEK, **DECODER}, {"model_type": "deepseek_v3"}
    ),
}


def write_safetensors(file: Path, shapes: Shapes) -> None:
    """Write tensors of zeros, which take no place on the disk."""
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        dtype = DTYPES.get(name, "BF16")
        num_bytes = prod(shape) * ITEM_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + num_bytes]}
        end += num_bytes
    encoded = json.dumps(header).encode()
    with file.open("wb") as stream:
        stream.write(len(encoded).to_bytes(8, "little") + encoded)
        stream.truncate(8 + len(encoded) + end)


def write_head(folder: Path, head: Head, file: str = "model.safetensors") -> Path:
    (folder / "config.json").write_text(json.dumps(head.config))
    if file.endswith(".safetensors"):
        write_safetensors(folder / file, head.shapes)
    else:
        stored = {name: Stored(DTYPES.get(name, "BF16"), shape) for name, shape in head.shapes.items()}
        write_torch_file(folder / file, stored)
    return folder
