# SPDX-License-Identifier: Apache-2.0
"""Which checkpoint do all engines of a comparison load? One of random weights, which this script writes, also as GGUF.

    python benchmarks/peers/make_checkpoint.py OUT [--shape benchmarks/shapes/qwen3-0.6b] [--layers N] [--gguf]
    python benchmarks/peers/make_checkpoint.py OUT --from-gguf FILE

OUT receives config.json, model.safetensors (torch layout, bf16) and the demonstration model's tokenizer; with --gguf
also model-TYPE.gguf for bf16, q8_0, q4_1 and q4_0 (requires the packages gguf and llama-cpp-python). The script
runs without this repository's package. The shape must be a Qwen3 or a Qwen3-MoE.

With --from-gguf OUT receives the four GGUF files of a real model: llama.cpp widens FILE to bf16, and quantizes that.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import numpy as np
from gguf_files import Bits, quantize, tensors, write_gguf, write_safetensors

ROOT = Path(__file__).resolve().parent.parent.parent
TOKENIZER = ROOT / "fastdeploy/assets/demo_model"
STD = 0.02
SOURCE, TYPES = "model-bf16.gguf", ("q8_0", "q4_1", "q4_0")


def draw(shape: tuple[int, ...], random: np.random.Generator) -> Bits:
    """Return ones for a norm, else normal values, in bf16."""
    values = np.ones(shape, np.float32)
    if len(shape) > 1:
        values = random.standard_normal(shape, np.float32) * STD
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def write_types(out: Path) -> None:
    """Let llama.cpp quantize model-bf16.gguf of a folder to the other types."""
    for kind in TYPES:
        quantize(out / SOURCE, out / f"model-{kind}.gguf", kind)


def main() -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", type=Path, default=ROOT / "benchmarks/shapes/qwen3-0.6b")
    parser.add_argument("--layers", type=int, help="number of layers, if it is not that of the shape")
    parser.add_argument("--gguf", action="store_true", help="write the GGUF files too")
    parser.add_argument("--from-gguf", type=Path, metavar="FILE", help="write only GGUF files, with this one's weights")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.from_gguf is not None:
        quantize(args.from_gguf, args.out / SOURCE, "bf16")
        write_types(args.out)
        return
    config = json.loads((args.shape / "config.json").read_text())
    if config["architectures"][0] not in ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM"):
        parser.error(f"--shape: expected a Qwen3 or a Qwen3-MoE, got {config['architectures']}")
    if args.layers is not None:
        config["num_hidden_layers"] = args.layers
    random = np.random.default_rng(0)
    weights = {name: draw(shape, random) for name, _, shape in tensors(config)}
    (args.out / "config.json").write_text(json.dumps(config, indent=2))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, args.out / name)
    write_safetensors(args.out / "model.safetensors", weights)
    if args.gguf:
        write_gguf(args.out / SOURCE, config, weights)
        write_types(args.out)


if __name__ == "__main__":
    main()
