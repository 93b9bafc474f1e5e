# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in Hugging Face layout: written for ERNIE-4.5 readers, read back for the evaluation."""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from demo_model.data import BOS_ID, EOS_ID, PAD_ID
from demo_model.experts import FLOAT32_PARAMETERS, NORM_MIN
from demo_model.model import Decoder, ModelShape, MTPLayer, rotary_rows

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
ROUTER_NAMES = {"gate": "gate.weight", "correction_bias": "moe_statics.e_score_correction_bias"}
MTP_PREFIXES = {
    "emb_norm.": "model.mtp_emb_norm.0.",
    "hidden_norm.": "model.mtp_hidden_norm.0.",
    "linear_proj.": "model.mtp_linear_proj.0.",
    "block.": "model.mtp_block.0.",
}


def expert_config(shape: ModelShape) -> dict:
    """Returns the keys of `config.json` that tell which layers have experts, and how they are chosen."""
    return {
        "moe_num_experts": shape.num_experts,
        "moe_k": shape.experts_per_token,
        "moe_intermediate_size": shape.expert_width,
        "moe_num_shared_experts": shape.num_shared_experts,
        "moe_layer_start_index": shape.num_dense_layers,
        "moe_layer_end_index": shape.num_layers - 1,
        "moe_layer_interval": 1,
        "moe_norm_min": NORM_MIN,
        "moe_gate_act": "softmax",
        "moe_use_aux_free": True,
    }


def size_keys(shape: ModelShape, num_layers: int) -> dict:
    """Returns the keys of `config.json` for the sizes of a decoder and for its positions."""
    return {
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.max_positions,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "rope_scaling": None,
    }


def model_config(shape: ModelShape, num_mtp_layers: int) -> dict:
    """Returns the contents of `config.json`."""
    sparse = shape.num_experts > 0
    return {
        "architectures": ["Ernie4_5_MoeForCausalLM" if sparse else "Ernie4_5ForCausalLM"],
        "model_type": "ernie4_5_moe" if sparse else "ernie4_5",
        **size_keys(shape, shape.num_layers),
        "use_bias": False,
        "tie_word_embeddings": True,
        "use_cache": True,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
        **(expert_config(shape) if sparse else {}),
        "num_nextn_predict_layers": num_mtp_layers,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
    }


def generation_config() -> dict:
    """Returns the contents of `generation_config.json`."""
    return {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID, "do_sample": False}


def reorder_rotary(state: dict[str, Tensor], head_dim: int, to_interleaved: bool) -> dict[str, Tensor]:
    """Reorders the rows of every query and key projection; other tensors pass through."""
    return {
        name: rotary_rows(value, head_dim, to_interleaved) if ".q_proj." in name or ".k_proj." in name else value
        for name, value in state.items()
    }


def split_experts(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Renames a router's tensors and cuts stacks of experts into one matrix per expert; other tensors pass through."""
    split: dict[str, Tensor] = {}
    for name, value in state.items():
        block, _, leaf = name.rpartition(".")
        if value.ndim == 3:
            split |= {f"{block}.experts.{index}.{leaf}.weight": matrix for index, matrix in enumerate(value)}
        elif name.endswith(FLOAT32_PARAMETERS):
            split[f"{block}.{ROUTER_NAMES[leaf]}"] = value[None] if leaf == "correction_bias" else value
        else:
            split[name] = value
    return split


def stack_experts(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Reverses `split_experts`."""
    leaves = {theirs: ours for ours, theirs in ROUTER_NAMES.items()}
    stacked, experts = {}, defaultdict[str, dict[int, Tensor]](dict)
    for name, value in state.items():
        block, _, leaf = name.partition(".mlp.")
        parts = leaf.split(".")
        if parts[0] == "experts":
            experts[f"{block}.mlp.{parts[2]}"][int(parts[1])] = value
        elif leaf in leaves:
            stacked[f"{block}.mlp.{leaves[leaf]}"] = value.flatten() if leaves[leaf] == "correction_bias" else value
        else:
            stacked[name] = value
    return stacked | {name: torch.stack([parts[i] for i in sorted(parts)]) for name, parts in experts.items()}


def checkpoint_tensors(decoder: Decoder, mtp: MTPLayer | None) -> dict[str, Tensor]:
    """Collects the tensors of `model.safetensors`, in bfloat16 but for those of routers."""
    state = {f"model.{name}": value for name, value in decoder.state_dict().items()}
    if mtp is not None:
        for name, value in mtp.state_dict().items():
            prefix = next(prefix for prefix in MTP_PREFIXES if name.startswith(prefix))
            state[MTP_PREFIXES[prefix] + name.removeprefix(prefix)] = value
    state = reorder_rotary(state, decoder.shape.head_dim, to_interleaved=True)
    stored = {}
    for name, value in state.items():
        dtype = torch.float32 if name.endswith(FLOAT32_PARAMETERS) else torch.bfloat16
        stored[name] = value.detach().to("cpu", dtype)
    return {name: value.contiguous() for name, value in split_experts(stored).items()}


def write_json(value: dict, path: Path) -> None:
    """Writes indented JSON."""
    path.write_text(json.dumps(value, indent=2) + "\n")


def write_checkpoint(folder: Path, tokenizer_dir: Path, decoder: Decoder, mtp: MTPLayer | None) -> None:
    """Writes one complete model folder."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(checkpoint_tensors(decoder, mtp), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    write_json(model_config(decoder.shape, 0 if mtp is None else 1), folder / "config.json")
    write_json(generation_config(), folder / "generation_config.json")
    for name in TOKENIZER_FILES:
        shutil.copyfile(tokenizer_dir / name, folder / name)


def read_checkpoint(folder: Path) -> tuple[Decoder, MTPLayer | None]:
    """Loads a folder written by `write_checkpoint`, in float32."""
    config = json.loads((folder / "config.json").read_text())
    shape = ModelShape(
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        max_positions=config["max_position_embeddings"],
        rope_theta=config["rope_theta"],
        norm_eps=config["rms_norm_eps"],
        num_experts=config.get("moe_num_experts", 0),
    )
    if shape.num_experts:
        shape = replace(
            shape,
            experts_per_token=config["moe_k"],
            expert_width=config["moe_intermediate_size"],
            num_shared_experts=config["moe_num_shared_experts"],
            num_dense_layers=config["moe_layer_start_index"],
        )
    state = {name: value.float() for name, value in load_file(folder / "model.safetensors").items()}
    state = stack_experts(reorder_rotary(state, shape.head_dim, to_interleaved=False))
    decoder, mtp = Decoder(shape), None
    if config["num_nextn_predict_layers"]:
        mtp = MTPLayer(shape)
        renamed: dict[str, Tensor] = {}
        for ours, theirs in MTP_PREFIXES.items():
            renamed |= {ours + name.removeprefix(theirs): state[name] for name in state if name.startswith(theirs)}
        mtp.load_state_dict(renamed)
    trunk = {name.removeprefix("model."): value for name, value in state.items() if ".mtp_" not in name}
    decoder.load_state_dict(trunk)
    return decoder, mtp


@torch.no_grad()
def compare_with_transformers(folder: Path, num_tokens: int = 300) -> dict[str, float]:
    """Measures the largest logit difference to transformers' class, in both number formats."""
    from transformers import Ernie4_5_MoeForCausalLM, Ernie4_5ForCausalLM

    decoder, _ = read_checkpoint(folder)
    tokens = torch.randint(8, decoder.shape.vocab_size, (1, num_tokens), generator=torch.Generator().manual_seed(0))
    differences = {}
    sparse = decoder.shape.num_experts > 0
    options = {"experts_implementation": "eager"} if sparse else {}
    architecture = Ernie4_5_MoeForCausalLM if sparse else Ernie4_5ForCausalLM
    for dtype in (torch.float32, torch.bfloat16):
        theirs = architecture.from_pretrained(folder, dtype=dtype, **options)(tokens).logits.float()
        hidden, _ = decoder.extend(tokens, None, dtype)
        ours = decoder.logits(hidden).float()
        differences[str(dtype).removeprefix("torch.")] = float((ours - theirs).abs().max())
    return differences
