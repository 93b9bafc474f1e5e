# SPDX-License-Identifier: Apache-2.0
"""How do a checkpoint's tensors become a GGUF file that llama.cpp loads? Names, order of rows, and both kinds of file.

Runs without this repository's package. Writing requires the package gguf, quantizing also llama-cpp-python.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

ARCHITECTURES = {
    "Ernie4_5ForCausalLM": "ernie4_5",
    "LlamaForCausalLM": "llama",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3moe",
}
"""Name in config.json -> name in a GGUF file."""
Bits = np.ndarray[Any, np.dtype[np.uint16]]  # bf16


def tensors(config: Mapping[str, Any]) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Yield each tensor's name in a torch checkpoint, in a GGUF file, and its shape; norms are vectors.

    The tensors of all experts of a layer have one name in a GGUF file, which holds them as one.
    """
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    has_head_norms = config["architectures"][0].startswith("Qwen3")
    yield "model.embed_tokens.weight", "token_embd.weight", (config["vocab_size"], hidden)
    for i in range(config["num_hidden_layers"]):
        layer = {
            "self_attn.q_proj": ("attn_q", (queries, hidden)),
            "self_attn.k_proj": ("attn_k", (keys, hidden)),
            "self_attn.v_proj": ("attn_v", (keys, hidden)),
            "self_attn.o_proj": ("attn_output", (hidden, queries)),
            **(head_norms(head_dim) if has_head_norms else {}),
            **(experts(config) if "num_experts" in config else feed_forward("mlp.", "", hidden, inner)),
            "input_layernorm": ("attn_norm", (hidden,)),
            "post_attention_layernorm": ("ffn_norm", (hidden,)),
        }
        for torch_name, (gguf_name, shape) in layer.items():
            yield f"model.layers.{i}.{torch_name}.weight", f"blk.{i}.{gguf_name}.weight", shape
    yield "model.norm.weight", "output_norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", "output.weight", (config["vocab_size"], hidden)


def head_norms(head_dim: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the norms of queries and keys."""
    return {f"self_attn.{name}_norm": (f"attn_{name}_norm", (head_dim,)) for name in "qk"}


def feed_forward(prefix: str, suffix: str, hidden: int, inner: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the three matrices of a feed-forward block."""
    return {
        f"{prefix}gate_proj": (f"ffn_gate{suffix}", (inner, hidden)),
        f"{prefix}up_proj": (f"ffn_up{suffix}", (inner, hidden)),
        f"{prefix}down_proj": (f"ffn_down{suffix}", (hidden, inner)),
    }


def experts(config: Mapping[str, Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the matrices of a block of experts."""
    hidden, inner, num_experts = config["hidden_size"], config["moe_intermediate_size"], config["num_experts"]
    matrices: dict[str, tuple[str, tuple[int, ...]]] = {"mlp.gate": ("ffn_gate_inp", (num_experts, hidden))}
    for index in range(num_experts):
        matrices.update(feed_forward(f"mlp.experts.{index}.", "_exps", hidden, inner))
    return matrices


def pairs_together(rows: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """Return the rows of a Llama's q or k, [num_heads * head_dim, hidden_size], in the order of a GGUF file.

    There a rotary pair is two neighbouring rows; in a checkpoint its second row is half a head behind the first.
    """
    halves = rows.reshape(num_heads, 2, -1, rows.shape[1])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def num_paired_heads(config: Mapping[str, Any], gguf_name: str) -> int | None:
    """Return the number of heads of a tensor whose rows a GGUF file has in another order; None for all others."""
    if config["architectures"] != ["LlamaForCausalLM"]:
        return None
    heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}.get(gguf_name.split(".")[-2])
    return None if heads is None else int(config[heads])


def write_safetensors(file: Path, weights: Mapping[str, Bits], layout: str = "pt") -> None:
    """Write bf16 tensors in the safetensors format: a JSON header, which names the framework, then the bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": layout}}
    end = 0
    for name, bits in weights.items():
        header[name] = {"dtype": "BF16", "shape": list(bits.shape), "data_offsets": [end, end + bits.nbytes]}
        end += bits.nbytes
    text = json.dumps(header).encode()
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for bits in weights.values():
            stream.write(bits.tobytes())


def read_safetensors(folder: Path) -> dict[str, Bits]:
    """Map the bf16 tensors of a checkpoint's files; others are left out."""
    weights = {}
    for file in sorted(folder.glob("*.safetensors")):
        data = np.memmap(file, np.uint8, "r")
        start = 8 + int.from_bytes(data[:8].tobytes(), "little")
        for name, entry in json.loads(data[8:start].tobytes()).items():
            if entry.get("dtype") == "BF16":
                begin, end = entry["data_offsets"]
                weights[name] = data[start + begin : start + end].view(np.uint16).reshape(entry["shape"])
    return weights


def in_gguf_order(config: Mapping[str, Any], weights: Mapping[str, Bits]) -> dict[str, Bits]:
    """Return a checkpoint's tensors under their names in a GGUF file; those of all experts of a layer become one."""
    by_name: dict[str, list[Bits]] = {}
    for torch_name, gguf_name, _ in tensors(config):
        heads, bits = num_paired_heads(config, gguf_name), weights[torch_name]
        by_name.setdefault(gguf_name, []).append(bits if heads is None else pairs_together(bits, heads))
    return {name: parts[0] if len(parts) == 1 else np.stack(parts) for name, parts in by_name.items()}


def rope_theta(config: Mapping[str, Any]) -> float:
    """Return the base of the rotary embedding, which transformers 5 writes inside `rope_parameters`."""
    return float(config.get("rope_parameters", config)["rope_theta"])


def write_gguf(file: Path, config: Mapping[str, Any], weights: Mapping[str, Bits]) -> None:
    """Write a checkpoint's bf16 tensors without a vocabulary (token ids only)."""
    import gguf

    writer = gguf.GGUFWriter(file, ARCHITECTURES[config["architectures"][0]])
    if "num_experts" in config:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(rope_theta(config))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_tokenizer_model("no_vocab")
    for name, bits in in_gguf_order(config, weights).items():
        if bits.ndim == 1 or "ffn_gate_inp" in name:  # llama.cpp has norms and routers in float32
            writer.add_tensor(name, (bits.astype(np.uint32) << 16).view(np.float32))
        else:
            writer.add_tensor(name, bits.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def quantize(source: Path, target: Path, kind: str, num_threads: int = 2) -> None:
    """Let llama.cpp write a file in its mix of a type, such as q4_0; the source may be quantized.

    Raises:
        SystemExit: llama.cpp reports an error.
    """
    import llama_cpp

    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.nthread = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind.upper()}"), num_threads
    params.allow_requantize = True
    if llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), params) != 0:
        raise SystemExit(f"llama.cpp could not quantize to {kind}")
