# SPDX-License-Identifier: Apache-2.0
"""What quantized weights or a quantized cache cost: bits per byte of held-out text, and how far log-probabilities move.

    python -m benchmarks.bench_quality [--model demo] [--tokens 32768] [--formats wint8 wint4]

The text is the part of Python's standard library that the demonstration model was not trained on (scripts/demo_model
holds files out by a hash of their path). `worse` is bits per byte over those of bf16, minus one. The second table is
of the golden checkpoints under tests/: random weights, so differences are larger than those of a trained model.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import paddle
from numpy.typing import NDArray

from benchmarks.report import ROOT, print_json, print_table
from fastdeploy.config.model_config import ModelConfig, resolve_model_path
from fastdeploy.config.quantization import FORMATS, QuantizationConfig
from fastdeploy.detokenize.tokenizer import Tokenizer
from fastdeploy.models.decoder import CausalLM
from fastdeploy.models.loader import load_model
from fastdeploy.ops.attention import allocate_kv_cache
from fastdeploy.ops.batch_index import BatchIndex
from fastdeploy.ops.buffer import HostBuffer
from fastdeploy.ops.registry import select_backend
from scripts.demo_model.data import read_corpus

GOLDEN = ROOT / "tests" / "golden"
BLOCK = 64
WINDOW = 1024  # tokens of a file that are scored, from its beginning
CACHE_FORMAT = "int8 cache"


class Numerics(NamedTuple):
    """How a model is held: its weights, and its keys and values."""

    quantization: QuantizationConfig
    kv_cache_dtype: str = "auto"


# Four bits everywhere, and formats of a single part, beside those that --quantization names.
MIXES: dict[str, dict[str, str]] = {
    "wint4, head too": {"attention": "wint4", "mlp": "wint4", "head": "wint4"},
    "attention wint4": {"attention": "wint4"},
    "mlp wint4": {"mlp": "wint4"},
    "head wint4": {"head": "wint4"},
}


def load(path: str | Path, numerics: Numerics, max_len: int) -> CausalLM:
    """Load a checkpoint in bfloat16 for one sequence of max_len tokens at a time."""
    config = ModelConfig.from_pretrained(path, dtype="bfloat16", kv_cache_dtype=numerics.kv_cache_dtype)
    return load_model(config, max_rows=max_len, max_model_len=max_len, quantization=numerics.quantization)


def logprobs(model: CausalLM, texts: Sequence[Sequence[int]]) -> list[NDArray[np.float64]]:
    """Return the log-probabilities after every token of every text: [num_tokens, vocab_size] each."""
    num_blocks = -(-model.max_model_len // BLOCK)
    heads = model.heads
    caches = [
        allocate_kv_cache(num_blocks, BLOCK, heads.num_kv_heads, heads.head_dim, model.config.kv_cache_dtype)
        for _ in range(model.num_layers)
    ]
    batch, token_ids = BatchIndex(model.max_rows, 1, num_blocks, BLOCK), HostBuffer(model.max_rows, "int32")
    out = paddle.zeros([model.max_rows, model.vocab_size], "float32")
    results = []
    for text in texts:
        count = np.array([len(text)], np.int32)
        metadata = batch.fill(count, np.zeros(1, np.int32), count, [np.arange(-(-len(text) // BLOCK), dtype=np.int32)])
        token_ids.array[: len(text)] = text
        hidden = model.forward(token_ids.tensor, metadata, caches)
        model.compute_logits(hidden, len(text), out)
        results.append(log_softmax(out.numpy()[: len(text)]))
    return results


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return log-probabilities in float64."""
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))


def held_out_texts(tokenizer: Tokenizer, num_tokens: int) -> list[list[int]]:
    """Return the beginnings of held-out files, about num_tokens tokens together."""
    texts: list[list[int]] = []
    for file in read_corpus():
        if file.held_out and sum(map(len, texts)) < num_tokens:
            texts.append(tokenizer.encode(file.text)[:WINDOW])
    return [text for text in texts if len(text) > 1]


def quality_of_text(path: str, formats: dict[str, Numerics], num_tokens: int) -> list[dict[str, Any]]:
    """Score the same text in every format."""
    tokenizer = Tokenizer.from_pretrained(path)
    texts = held_out_texts(tokenizer, num_tokens)
    num_bytes = sum(len(tokenizer.decode(text[1:]).encode()) for text in texts)
    rows: list[dict[str, Any]] = []
    for name, numerics in formats.items():
        model = load(path, numerics, WINDOW)
        nats = 0.0
        for text in texts:
            found = logprobs_of_next(model, text)
            nats -= float(found.sum())
        bits = nats / math.log(2) / num_bytes
        worse = bits / rows[0]["bits_per_byte"] - 1 if rows else 0.0
        rows.append({"format": name, "bits_per_byte": bits, "worse": worse, "MiB": model.num_weight_bytes / 2**20})
    return rows


def logprobs_of_next(model: CausalLM, text: Sequence[int]) -> NDArray[np.float64]:
    """Return the log-probability of every token of a text after its first."""
    (found,) = logprobs(model, [text])
    return np.asarray(found[np.arange(len(text) - 1), np.asarray(text[1:])])


def quality_of_goldens(formats: dict[str, Numerics]) -> list[dict[str, Any]]:
    """Return the largest and mean difference of any log-probability from bf16, over the golden checkpoints."""
    names = sorted(path.name for path in GOLDEN.iterdir() if (path / "reference.npz").exists())
    tokens = [[int(token) for token in np.random.default_rng(0).integers(0, 112, 60)]]
    rows = []
    plain = [logprobs(load(GOLDEN / name, Numerics(QuantizationConfig()), 64), tokens)[0] for name in names]
    for format, numerics in formats.items():
        found = [logprobs(load(GOLDEN / name, numerics, 64), tokens)[0] for name in names]
        errors = [np.abs(one - other) for one, other in zip(found, plain, strict=True)]
        largest = max(float(error.max()) for error in errors)
        rows.append({"format": format, "largest": largest, "mean": float(np.mean([error.mean() for error in errors]))})
    return rows


def _shown(row: dict[str, Any]) -> list[Any]:
    return [f"{row['bits_per_byte']:.4f}" if name == "bits_per_byte" else value for name, value in row.items()]


def main() -> None:
    """Print both tables and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="directory, or demo (default: demo)")
    parser.add_argument("--tokens", type=int, default=32768, help="tokens to score, about (default: 32768)")
    parser.add_argument("--formats", nargs="+", choices=FORMATS[1:], default=FORMATS[1:], help="(default: all)")
    parser.add_argument("--mixes", action="store_true", help="also four bits in single parts")
    args = parser.parse_args()
    paddle.set_device("cpu")
    select_backend("cpu")
    plain = QuantizationConfig()
    formats = {"bf16": Numerics(plain), CACHE_FORMAT: Numerics(plain, "int8")}
    mixes = {**{name: name for name in args.formats}, **(MIXES if args.mixes else {})}
    formats |= {name: Numerics(QuantizationConfig.from_value(mix)) for name, mix in mixes.items()}
    text = quality_of_text(resolve_model_path(args.model), formats, args.tokens)
    print_table(f"{args.model}: held-out text", list(text[0]), [_shown(row) for row in text])
    golden = quality_of_goldens({name: value for name, value in formats.items() if name != "bf16"})
    print_table(
        "golden checkpoints: log-probabilities against bf16", list(golden[0]), [list(r.values()) for r in golden]
    )
    print_json({"benchmark": "quality", "model": args.model, "text": text, "golden": golden})


if __name__ == "__main__":
    main()
