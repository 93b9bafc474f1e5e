# SPDX-License-Identifier: Apache-2.0
"""Draft heads in the file formats in which heads for other models are published."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from demo_model.data import BOS_ID, EOS_ID, PAD_ID
from demo_model.export import size_keys, write_json
from demo_model.head_rows import TAPS
from demo_model.heads import DRAFT_VOCAB_SIZE, MEDUSA_HEADS, MLP_DRAFTS, MLP_WIDTH, Eagle3
from demo_model.model import ModelShape

EAGLE_NAMES = {"layer.": "layers.0.", "fc.": "fc."}
EAGLE3_NAMES = {
    "layer.": "midlayer.",
    "input_layernorm.": "midlayer.input_layernorm.",
    "hidden_norm.": "midlayer.hidden_norm.",
    "fc.": "fc.",
    "norm.": "norm.",
    "lm_head.": "lm_head.",
}
MLP_NAMES = {
    "embed_tokens.": "speculator.emb.0.",
    "lm_head.": "speculator.head.0.",
    "ln.": "speculator.ln.0.",
    "proj.": "speculator.proj.",
}
MEDUSA_NAMES = {f"blocks.{i}.": f"blocks.{i}.layers.0." for i in range(MEDUSA_HEADS)}
NAMES = {"eagle": EAGLE_NAMES, "eagle3": EAGLE3_NAMES, "mlp": MLP_NAMES, "medusa": MEDUSA_NAMES}


def layer_config(shape: ModelShape) -> dict:
    """Returns the keys of a one-layer Llama configuration; rotary halves, as in every Llama file."""
    return {
        "model_type": "llama",
        **size_keys(shape, num_layers=1),
        "tie_word_embeddings": False,
        "use_cache": True,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
        "torch_dtype": "bfloat16",
    }


def head_config(name: str, shape: ModelShape) -> dict:
    """Returns the contents of a head's `config.json`."""
    if name == "eagle":
        return {"architectures": ["LlamaForCausalLM"], **layer_config(shape), "bias": True}
    if name == "eagle3":
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            **layer_config(shape),
            "draft_vocab_size": DRAFT_VOCAB_SIZE,
            "target_hidden_size": shape.hidden_size,
            "norm_before_residual": False,
            "eagle_aux_hidden_state_layer_ids": list(TAPS),
        }
    if name == "mlp":
        return {
            "architectures": ["MLPSpeculatorPreTrainedModel"],
            "model_type": "mlp_speculator",
            "vocab_size": shape.vocab_size,
            "emb_dim": shape.hidden_size,
            "inner_dim": MLP_WIDTH,
            "n_predict": MLP_DRAFTS,
            "top_k_tokens_per_head": [1] * MLP_DRAFTS,
            "n_candidates": 1,
            "tie_weights": True,
            "scale_input": True,
            "torch_dtype": "bfloat16",
        }
    return {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "vocab_size": shape.vocab_size,
        "truncated_vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "num_heads": MEDUSA_HEADS,
        "num_hidden_layers": 1,
        "medusa_fc_bias": True,
        "original_lm_head": True,
        "torch_dtype": "bfloat16",
    }


def vocabulary_maps(draft_ids: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """Returns the offset from each draft id to its token, and which tokens have a draft id."""
    known = torch.zeros(vocab_size, dtype=torch.bool)
    known[draft_ids] = True
    return {"d2t": draft_ids - torch.arange(len(draft_ids)), "t2d": known}


def head_tensors(name: str, head: nn.Module, vocab_size: int) -> dict[str, Tensor]:
    """Returns the tensors of a head's `model.safetensors`, weights in bfloat16."""
    renamed = {}
    for parameter, value in head.named_parameters():
        ours, theirs = next(pair for pair in NAMES[name].items() if parameter.startswith(pair[0]))
        renamed[theirs + parameter.removeprefix(ours)] = value.detach().to("cpu", torch.bfloat16).contiguous()
    return renamed | (vocabulary_maps(head.draft_ids.cpu(), vocab_size) if isinstance(head, Eagle3) else {})


def write_head(name: str, head: nn.Module, shape: ModelShape, folder: Path) -> None:
    """Writes the folder of one head."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(head_tensors(name, head, shape.vocab_size), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    write_json(head_config(name, shape), folder / "config.json")
