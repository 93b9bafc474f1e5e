# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in Hugging Face layout: written for ERNIE-4.5 readers, read back for the evaluation."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from demo_model.data import BOS_ID, EOS_ID, PAD_ID
from demo_model.model import Decoder, ModelShape, MTPLayer, rotary_rows

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
MTP_PREFIXES = {
    "emb_norm.": "model.mtp_emb_norm.0.",
    "hidden_norm.": "model.mtp_hidden_norm.0.",
    "linear_proj.": "model.mtp_linear_proj.0.",
    "block.": "model.mtp_block.0.",
}


def model_config(shape: ModelShape, num_mtp_layers: int) -> dict:
    """Returns the contents of `config.json`."""
    return {
        "architectures": ["Ernie4_5ForCausalLM"],
        "model_type": "ernie4_5",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.max_positions,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "rope_scaling": None,
        "use_bias": False,
        "tie_word_embeddings": True,
        "use_cache": True,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
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


def checkpoint_tensors(decoder: Decoder, mtp: MTPLayer | None) -> dict[str, Tensor]:
    """Collects the tensors of `model.safetensors` in bfloat16."""
    state = {f"model.{name}": value for name, value in decoder.state_dict().items()}
    if mtp is not None:
        for name, value in mtp.state_dict().items():
            prefix = next(prefix for prefix in MTP_PREFIXES if name.startswith(prefix))
            state[MTP_PREFIXES[prefix] + name.removeprefix(prefix)] = value
    state = reorder_rotary(state, decoder.shape.head_dim, to_interleaved=True)
    return {name: value.detach().to("cpu", torch.bfloat16).contiguous() for name, value in state.items()}


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
    )
    state = {name: value.float() for name, value in load_file(folder / "model.safetensors").items()}
    state = reorder_rotary(state, shape.head_dim, to_interleaved=False)
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
    """Measures the largest logit difference to transformers' Ernie4_5ForCausalLM, in both number formats."""
    from transformers import Ernie4_5ForCausalLM

    decoder, _ = read_checkpoint(folder)
    tokens = torch.randint(8, decoder.shape.vocab_size, (1, num_tokens), generator=torch.Generator().manual_seed(0))
    differences = {}
    for dtype in (torch.float32, torch.bfloat16):
        theirs = Ernie4_5ForCausalLM.from_pretrained(folder, dtype=dtype)(tokens).logits.float()
        hidden, _ = decoder.extend(tokens, None, dtype)
        ours = decoder.logits(hidden).float()
        differences[str(dtype).removeprefix("torch.")] = float((ours - theirs).abs().max())
    return differences
