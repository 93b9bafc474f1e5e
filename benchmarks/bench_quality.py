# SPDX-License-Identifier: Apache-2.0
"""How many bits per byte of text do quantized weights or a quantized cache cost?

    python -m benchmarks.bench_quality [--model demo] [--tokens 32768] [--formats wint8 wint4] [--mixes]

The text is the part of Python's standard library that the demonstration model was not trained on (scripts/demo_model
chooses files by a hash of their path). `worse` is bits per byte over those of bf16, the baseline, minus one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import paddle
from numpy.typing import NDArray

from benchmarks.report import Row, make_parser, print_report
from fastdeploy.config.model_config import ModelConfig
from fastdeploy.config.quantization import FORMATS, QuantizationConfig
from fastdeploy.detokenize.tokenizer import Tokenizer
from fastdeploy.hub.model_path import resolve_model_path
from fastdeploy.models.loader import load_model
from fastdeploy.ops.attention import allocate_kv_cache
from fastdeploy.ops.batch_index import BatchIndex
from fastdeploy.ops.buffer import HostBuffer
from fastdeploy.ops.registry import select_backend
from scripts.demo_model.data import read_corpus

BLOCK_SIZE = 64
WINDOW = 1024  # tokens scored from the beginning of each file


class Numerics(NamedTuple):
    """The formats of a model's weights, and of its keys and values."""

    quantization: QuantizationConfig
    kv_cache_dtype: str = "auto"


MIXES = {"wint4, head too": {"attention": "wint4", "mlp": "wint4", "head": "wint4"}}


class Scorer:
    """A checkpoint in one format that computes log-probabilities of one text at a time."""

    def __init__(self, path: str, numerics: Numerics) -> None:
        config = ModelConfig.from_pretrained(path, dtype="bfloat16", kv_cache_dtype=numerics.kv_cache_dtype)
        self.model = load_model(config, max_rows=WINDOW, max_model_len=WINDOW, quantization=numerics.quantization)
        heads, num_blocks = self.model.heads, -(-WINDOW // BLOCK_SIZE)
        sizes = (num_blocks, BLOCK_SIZE, heads.num_kv_heads, heads.head_dim)
        self._caches = [allocate_kv_cache(*sizes, config.kv_cache_dtype) for _ in range(self.model.num_layers)]
        self._batch = BatchIndex(WINDOW, 1, num_blocks, BLOCK_SIZE)
        self._token_ids = HostBuffer(WINDOW, "int32")
        self._logits = paddle.zeros([WINDOW, self.model.vocab_size], "float32")

    def logprobs_of_next(self, text: Sequence[int]) -> NDArray[np.float64]:
        """Return the log-probability of each token of a text after the first."""
        count = np.array([len(text)], np.int32)
        blocks = np.arange(-(-len(text) // BLOCK_SIZE), dtype=np.int32)
        metadata = self._batch.fill(count, np.zeros(1, np.int32), count, [blocks])
        self._token_ids.array[: len(text)] = text
        hidden = self.model.forward(self._token_ids.tensor, metadata, self._caches)
        self.model.compute_logits(hidden, len(text), self._logits)
        logits = self._logits.numpy()[: len(text) - 1].astype(np.float64)
        logits -= logits.max(-1, keepdims=True)
        chosen = logits[np.arange(len(text) - 1), np.asarray(text[1:])]
        return np.asarray(chosen - np.log(np.exp(logits).sum(-1)))


def held_out_texts(tokenizer: Tokenizer, num_tokens: int) -> list[list[int]]:
    """Return the beginnings of held-out files, about `num_tokens` tokens in total."""
    texts: list[list[int]] = []
    for file in read_corpus():
        if file.held_out and sum(map(len, texts)) < num_tokens:
            texts.append(tokenizer.encode(file.text)[:WINDOW])
    return [text for text in texts if len(text) > 1]


def measure(path: str, formats: dict[str, Numerics], num_tokens: int) -> list[Row]:
    """Score the same text in each format."""
    tokenizer = Tokenizer.from_pretrained(path)
    texts = held_out_texts(tokenizer, num_tokens)
    num_bytes = sum(len(tokenizer.decode(text[1:]).encode()) for text in texts)
    rows: list[Row] = []
    for name, numerics in formats.items():
        scorer = Scorer(path, numerics)
        bits = -sum(float(scorer.logprobs_of_next(text).sum()) for text in texts) / math.log(2) / num_bytes
        worse = bits / rows[0]["bits_per_byte"] - 1 if rows else 0.0
        mib = scorer.model.num_weight_bytes / 2**20
        rows.append({"format": name, "bits_per_byte": bits, "worse": worse, "weights_mib": mib})
    return rows


def main() -> None:
    """Print one row per format and one JSON line."""
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="demo", help="directory, or demo (default: demo)")
    parser.add_argument("--tokens", type=int, default=32768, help="tokens to score, about (default: 32768)")
    parser.add_argument("--formats", nargs="+", choices=FORMATS[1:], default=FORMATS[1:], help="(default: all)")
    parser.add_argument("--mixes", action="store_true", help="also four bits in the head")
    args = parser.parse_args()
    paddle.set_device("cpu")
    select_backend("cpu")
    plain = QuantizationConfig()
    mixes = {**{name: name for name in args.formats}, **(MIXES if args.mixes else {})}
    formats = {"bf16": Numerics(plain), "int8 cache": Numerics(plain, "int8")}
    formats |= {name: Numerics(QuantizationConfig.from_value(mix)) for name, mix in mixes.items()}
    rows = measure(resolve_model_path(args.model), formats, args.tokens)
    print_report("quality", f"{args.model}: held-out text", rows, model=args.model)


if __name__ == "__main__":
    main()
