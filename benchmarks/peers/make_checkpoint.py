# SPDX-License-Identifier: Apache-2.0
"""Which checkpoint do all engines of a comparison load? One of random weights, which this script writes, also as GGUF.

    python benchmarks/peers/make_checkpoint.py OUT [--shape benchmarks/shapes/qwen3-0.6b] [--layers N] [--gguf]

OUT receives config.json, model.safetensors (torch layout, bf16) and the demonstration model's tokenizer; with --gguf
also model-bf16.gguf, model-q8_0.gguf and model-q4_0.gguf (requires the packages gguf and llama-cpp-python). The script
runs without this repository's package. The shape must be a Qwen3 or a Qwen3-MoE, whose tensor names it contains.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent.parent
TOKENIZER = ROOT / "fastdeploy/assets/demo_model"
STD = 0.02
Bits = np.ndarray[Any, np.dtype[np.uint16]]  # bf16


def tensors(config: dict[str, Any]) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Yield every tensor's name in a torch checkpoint, in a GGUF file, and its shape; norms are vectors.

    The tensors of all experts of a layer have one name in a GGUF file, which holds them as one.
    """
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    yield "model.embed_tokens.weight", "token_embd.weight", (config["vocab_size"], hidden)
    for i in range(config["num_hidden_layers"]):
        layer = {
            "self_attn.q_proj": ("attn_q", (queries, hidden)),
            "self_attn.k_proj": ("attn_k", (keys, hidden)),
            "self_attn.v_proj": ("attn_v", (keys, hidden)),
            "self_attn.o_proj": ("attn_output", (hidden, queries)),
            "self_attn.q_norm": ("attn_q_norm", (head_dim,)),
            "self_attn.k_norm": ("attn_k_norm", (head_dim,)),
            **(experts(config) if "num_experts" in config else feed_forward("mlp.", "", hidden, inner)),
            "input_layernorm": ("attn_norm", (hidden,)),
            "post_attention_layernorm": ("ffn_norm", (hidden,)),
        }
        for torch_name, (gguf_name, shape) in layer.items():
            yield f"model.layers.{i}.{torch_name}.weight", f"blk.{i}.{gguf_name}.weight", shape
    yield "model.norm.weight", "output_norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", "output.weight", (config["vocab_size"], hidden)


def feed_forward(prefix: str, suffix: str, hidden: int, inner: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the three matrices of a feed-forward block."""
    return {
        f"{prefix}gate_proj": (f"ffn_gate{suffix}", (inner, hidden)),
        f"{prefix}up_proj": (f"ffn_up{suffix}", (inner, hidden)),
        f"{prefix}down_proj": (f"ffn_down{suffix}", (hidden, inner)),
    }


def experts(config: dict[str, Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the matrices of a block of experts."""
    hidden, inner, num_experts = config["hidden_size"], config["moe_intermediate_size"], config["num_experts"]
    matrices: dict[str, tuple[str, tuple[int, ...]]] = {"mlp.gate": ("ffn_gate_inp", (num_experts, hidden))}
    for index in range(num_experts):
        matrices.update(feed_forward(f"mlp.experts.{index}.", "_exps", hidden, inner))
    return matrices


def draw(shape: tuple[int, ...], random: np.random.Generator) -> Bits:
    """Return ones for a norm, else normal values, in bf16."""
    values = np.ones(shape, np.float32)
    if len(shape) > 1:
        values = random.standard_normal(shape, np.float32) * STD
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def write_safetensors(file: Path, weights: dict[str, Bits], layout: str = "pt") -> None:
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


def write_gguf(folder: Path, config: dict[str, Any], weights: dict[str, Bits]) -> None:
    """Write model-bf16.gguf without a vocabulary (token ids only), and let llama.cpp quantize it."""
    import gguf
    import llama_cpp

    file = folder / "model-bf16.gguf"
    writer = gguf.GGUFWriter(file, "qwen3moe" if "num_experts" in config else "qwen3")
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
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_tokenizer_model("no_vocab")
    for name, bits in weights.items():
        if bits.ndim == 1 or "ffn_gate_inp" in name:  # llama.cpp has norms and routers in float32
            writer.add_tensor(name, (bits.astype(np.uint32) << 16).view(np.float32))
        else:
            writer.add_tensor(name, bits.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    for kind, file_type in (("q8_0", llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0), ("q4_0", llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0)):
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype, params.nthread = file_type, 2
        source, target = str(file).encode(), str(folder / f"model-{kind}.gguf").encode()
        if llama_cpp.llama_model_quantize(source, target, params) != 0:
            raise SystemExit(f"llama.cpp could not quantize to {kind}")


def main() -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", type=Path, default=ROOT / "benchmarks/shapes/qwen3-0.6b")
    parser.add_argument("--layers", type=int, help="number of layers, if it is not that of the shape")
    parser.add_argument("--gguf", action="store_true", help="write the GGUF files too")
    args = parser.parse_args()
    config = json.loads((args.shape / "config.json").read_text())
    if config["architectures"][0] not in ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM"):
        parser.error(f"--shape: expected a Qwen3 or a Qwen3-MoE, got {config['architectures']}")
    if args.layers is not None:
        config["num_hidden_layers"] = args.layers
    random = np.random.default_rng(0)
    names = list(tensors(config))
    weights = [draw(shape, random) for *_, shape in names]
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "config.json").write_text(json.dumps(config, indent=2))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, args.out / name)
    write_safetensors(args.out / "model.safetensors", {name: bits for (name, *_), bits in zip(names, weights)})
    if args.gguf:
        write_gguf(args.out, config, merge([(name, bits) for (_, name, _), bits in zip(names, weights)]))


def merge(weights: list[tuple[str, Bits]]) -> dict[str, Bits]:
    """Return the tensors by name; those with the same name become one with an axis more."""
    by_name: dict[str, list[Bits]] = {}
    for name, bits in weights:
        by_name.setdefault(name, []).append(bits)
    return {name: parts[0] if len(parts) == 1 else np.stack(parts) for name, parts in by_name.items()}


if __name__ == "__main__":
    main()
