# SPDX-License-Identifier: Apache-2.0
"""Draft heads for a shape: config.json and the names and shapes of the tensors, for engines of random weights.

The sizes are those of published heads: one decoder layer like the target's, three taps and 32,000 ids for EAGLE-3, an
inner width of the target's for MLP speculators, and Medusa's heads on the target's matrix of logits.
"""

from __future__ import annotations

import json
import struct
from math import prod
from pathlib import Path

from fastdeploy.config.model_config import ModelConfig

NUM_TAPS, DRAFT_VOCAB, NUM_PREDICTED, NUM_MEDUSA_HEADS = 3, 32_000, 3, 4
_ITEM_BYTES = {"BF16": 2, "I64": 8}
Shapes = dict[str, tuple[int, ...]]


def write_shape_head(method: str, target: ModelConfig, folder: Path) -> None:
    """Write a head of a method for a target; the file of its weights is sparse."""
    config, shapes = _HEADS[method](target)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    header, end = dict[str, object](), 0
    for name, shape in shapes.items():
        dtype = "I64" if name == "d2t" else "BF16"
        begin, end = end, end + prod(shape) * _ITEM_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(file.tell() + end)


def _layer(target: ModelConfig, name: str, inputs: int) -> Shapes:
    hidden, width, size = target.hidden_size, target.intermediate_size, target.head_dim
    heads, kv_heads = target.num_heads * size, target.num_kv_heads * size
    return {
        f"{name}.self_attn.q_proj.weight": (heads, inputs),
        f"{name}.self_attn.k_proj.weight": (kv_heads, inputs),
        f"{name}.self_attn.v_proj.weight": (kv_heads, inputs),
        f"{name}.self_attn.o_proj.weight": (hidden, heads),
        f"{name}.mlp.gate_proj.weight": (width, hidden),
        f"{name}.mlp.up_proj.weight": (width, hidden),
        f"{name}.mlp.down_proj.weight": (hidden, width),
        f"{name}.post_attention_layernorm.weight": (hidden,),
    }


def _decoder(target: ModelConfig, architecture: str) -> dict[str, object]:
    return {
        "architectures": [architecture],
        "model_type": "llama",
        "vocab_size": target.vocab_size,
        "hidden_size": target.hidden_size,
        "intermediate_size": target.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": target.num_heads,
        "num_key_value_heads": target.num_kv_heads,
        "head_dim": target.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 2048,
    }


def _eagle(target: ModelConfig) -> tuple[dict[str, object], Shapes]:
    hidden = target.hidden_size
    shapes = {"fc.weight": (hidden, 2 * hidden), "fc.bias": (hidden,), **_layer(target, "layers.0", hidden)}
    return _decoder(target, "LlamaForCausalLM") | {"bias": True}, shapes


def _eagle3(target: ModelConfig) -> tuple[dict[str, object], Shapes]:
    hidden, num_ids = target.hidden_size, min(DRAFT_VOCAB, target.vocab_size)
    shapes: Shapes = {"fc.weight": (hidden, NUM_TAPS * hidden), "lm_head.weight": (num_ids, hidden), "d2t": (num_ids,)}
    shapes |= {f"{name}.weight": (hidden,) for name in ("norm", "midlayer.input_layernorm", "midlayer.hidden_norm")}
    shapes |= _layer(target, "midlayer", 2 * hidden)
    return _decoder(target, "LlamaForCausalLMEagle3") | {"draft_vocab_size": num_ids}, shapes


def _mlp_speculator(target: ModelConfig) -> tuple[dict[str, object], Shapes]:
    hidden, vocab = target.hidden_size, target.vocab_size
    config = {
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "model_type": "mlp_speculator",
        "vocab_size": vocab,
        "emb_dim": hidden,
        "inner_dim": hidden,
        "n_predict": NUM_PREDICTED,
        "tie_weights": True,
        "scale_input": True,
    }
    shapes: Shapes = {f"speculator.{name}.0.weight": (vocab, hidden) for name in ("emb", "head")}
    shapes |= {f"speculator.ln.0.{part}": (hidden,) for part in ("weight", "bias")}
    shapes |= {f"speculator.proj.{index}.weight": (hidden, hidden) for index in range(2)}
    return config, shapes


def _medusa(target: ModelConfig) -> tuple[dict[str, object], Shapes]:
    hidden = target.hidden_size
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "vocab_size": target.vocab_size,
        "truncated_vocab_size": target.vocab_size,
        "hidden_size": hidden,
        "num_heads": NUM_MEDUSA_HEADS,
        "num_hidden_layers": 1,
        "medusa_fc_bias": True,
        "original_lm_head": True,
    }
    shapes: Shapes = {f"blocks.{i}.layers.0.weight": (hidden, hidden) for i in range(NUM_MEDUSA_HEADS)}
    return config, shapes | {f"blocks.{i}.layers.0.bias": (hidden,) for i in range(NUM_MEDUSA_HEADS)}


_HEADS = {"eagle": _eagle, "eagle3": _eagle3, "mlp_speculator": _mlp_speculator, "medusa": _medusa}
