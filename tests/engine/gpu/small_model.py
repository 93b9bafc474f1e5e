# SPDX-License-Identifier: Apache-2.0
"""A model of 0.2 million parameters that the emulator executes quickly, whose text is partly predictable.

The head's row of token v is the embedding of the token before v in a cycle, so that each token is most likely followed
by the next one of its cycle; small random layers make the other tokens depend on the context. The layer for multi-token
prediction passes the embedding on, so that it proposes the next token of the cycle too.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from tests.drafting_models import HEADS
from tests.gguf.rewritten import write_gguf
from tests.spec_decode.drafting import head_folders

VOCAB_SIZE, HIDDEN, INNER, NUM_LAYERS, NUM_HEADS, HEAD_DIM = 512, 64, 128, 2, 2, 64
CYCLE = 11  # tokens after which a text repeats itself, if nothing else happens
Tensors = dict[str, NDArray[np.float32]]


def write_model(folder: Path, seed: int = 0, noise: float = 1.2, has_mtp_layer: bool = True) -> Path:
    """Write a checkpoint in the form of Qwen3, stored as float32 and to be run in bfloat16.

    Args:
        seed: of the layers; models of different seeds have the same cycles.
        noise: size of the layers' contribution.
        has_mtp_layer: whether it contains a layer for multi-token prediction.
    """
    rng = np.random.default_rng([seed, 1])
    tensors = model_tensors(seed, noise, rng)
    if has_mtp_layer:
        tensors |= _mtp_layer(tensors, rng, noise)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(_CONFIG))
    return folder


def write_heads(folder: Path) -> None:
    """Write a random head of every method for the small model."""
    for method in HEADS:
        write: Callable[..., Path] = getattr(head_folders, method)
        taps = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]} if method == "eagle3" else {}
        write(folder / method, hidden=HIDDEN, vocab=VOCAB_SIZE, **taps)


def model_tensors(seed: int, noise: float, rng: np.random.Generator | None = None) -> Tensors:
    """Return the weights of the decoder; the layers' are taken from `rng`, which follows from the seed."""
    rng, shared = rng or np.random.default_rng([seed, 1]), np.random.default_rng(0)
    embedding = shared.standard_normal((VOCAB_SIZE, HIDDEN)).astype(np.float32)
    tensors: Tensors = {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": np.ones(HIDDEN, np.float32),
        "lm_head.weight": embedding[[_previous(token) for token in range(VOCAB_SIZE)]] * np.float32(0.12),
    }
    for index in range(NUM_LAYERS):
        tensors |= _block(f"model.layers.{index}", rng, noise)
    return tensors


def write_gguf_model(path: Path, kind_of: Callable[[str], str], seed: int = 0, is_tied: bool = False) -> Path:
    """Write the same model, without a layer for multi-token prediction and a tokenizer, as a GGUF file.

    Args:
        kind_of: the type of a matrix by its name in the file.
        is_tied: whether the head is the embedding, so that a token is most likely followed by itself.
    """
    values = model_tensors(seed, 1.2)
    if is_tied:
        del values["lm_head.weight"]
    return write_gguf(path, _METADATA, {_gguf_name(name): value for name, value in values.items()}, kind_of)


def _gguf_name(name: str) -> str:
    for ours, theirs in _GGUF_NAMES.items():
        name = name.replace(ours, theirs)
    return name


def _previous(token: int) -> int:
    """Return the token that is most likely followed by this one."""
    first = token // CYCLE * CYCLE
    return first + (token - first - 1) % min(CYCLE, VOCAB_SIZE - first)


def _block(prefix: str, rng: np.random.Generator, noise: float) -> Tensors:
    """Return the weights of a decoder layer."""
    query, key_value = NUM_HEADS * HEAD_DIM, HEAD_DIM
    shapes = {
        "self_attn.q_proj": (query, HIDDEN),
        "self_attn.k_proj": (key_value, HIDDEN),
        "self_attn.v_proj": (key_value, HIDDEN),
        "self_attn.o_proj": (HIDDEN, query),
        "mlp.gate_proj": (INNER, HIDDEN),
        "mlp.up_proj": (INNER, HIDDEN),
        "mlp.down_proj": (HIDDEN, INNER),
    }
    tensors: Tensors = {}
    for name, (rows, columns) in shapes.items():
        scale = columns**-0.5 * (noise if rows == HIDDEN and columns != HIDDEN else 1.0)
        tensors[f"{prefix}.{name}.weight"] = rng.standard_normal((rows, columns)).astype(np.float32) * np.float32(scale)
    for name in ("input_layernorm", "post_attention_layernorm"):
        tensors[f"{prefix}.{name}.weight"] = np.ones(HIDDEN, np.float32)
    for name in ("q_norm", "k_norm"):
        tensors[f"{prefix}.self_attn.{name}.weight"] = np.ones(HEAD_DIM, np.float32)
    return tensors


def _mtp_layer(target: Tensors, rng: np.random.Generator, noise: float) -> Tensors:
    """Return the weights of a layer for multi-token prediction in DeepSeek's form; head and embedding are copies."""
    prefix = f"model.layers.{NUM_LAYERS}"
    projection = np.zeros((HIDDEN, 2 * HIDDEN), np.float32)
    projection[:, :HIDDEN] = np.eye(HIDDEN)
    projection[:, HIDDEN:] = rng.standard_normal((HIDDEN, HIDDEN)) * 0.02
    return {
        **{f"{prefix}.{name}.weight": np.ones(HIDDEN, np.float32) for name in ("enorm", "hnorm", "shared_head.norm")},
        f"{prefix}.eh_proj.weight": projection,
        f"{prefix}.shared_head.head.weight": target["lm_head.weight"].copy(),
        f"{prefix}.embed_tokens.weight": target["model.embed_tokens.weight"].copy(),
        **_block(prefix, rng, noise),
    }


_CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": NUM_HEADS,
    "num_key_value_heads": 1,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
}
_METADATA = {
    "general.architecture": "qwen3",
    "tokenizer.ggml.model": "no_vocab",
    "qwen3.vocab_size": VOCAB_SIZE,
    "qwen3.embedding_length": HIDDEN,
    "qwen3.feed_forward_length": INNER,
    "qwen3.block_count": NUM_LAYERS,
    "qwen3.attention.head_count": NUM_HEADS,
    "qwen3.attention.head_count_kv": 1,
    "qwen3.attention.key_length": HEAD_DIM,
    "qwen3.attention.value_length": HEAD_DIM,
    "qwen3.attention.layer_norm_rms_epsilon": 1e-6,
    "qwen3.context_length": 512,
    "qwen3.rope.freq_base": 10000.0,
}
_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers.": "blk.",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    **{f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"},
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
}
