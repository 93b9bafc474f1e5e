# SPDX-License-Identifier: Apache-2.0
"""How well does this engine predict text with the GGUF files that llama.cpp loads?

    python -m benchmarks.bench_file_quality FOLDER --peers-python VENV/bin/python [--tokens 20480]

FOLDER has the GGUF files of a model in several types (benchmarks/peers/README.md). This engine keeps their codes, with
inputs of 16 bits and of eight; llama.cpp has eight. The texts and figures are those of bench_quality; the reference is
the file in bf16, computed in float32.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import paddle

from benchmarks.bench_quality import (
    REFERENCE,
    SAME_FILE,
    ModelScorer,
    Numerics,
    PeerScorer,
    Scorer,
    choose_texts,
    measure,
)
from benchmarks.quality_texts import digest
from benchmarks.report import make_parser, print_report
from fastdeploy.config.quantization import QuantizationConfig
from fastdeploy.detokenize.tokenizer import Tokenizer
from fastdeploy.hub.model_path import resolve_model_path
from fastdeploy.ops.registry import select_backend

FORMATS = {"bf16": ["none"], "q8_0": ["gguf", "w8a8"], "q4_1": ["gguf", "w4a8"], "q4_0": ["gguf", "w4a8"]}
"""Type of a file -> formats in which this engine computes with its codes."""
[SAME_TYPE] = SAME_FILE


def make_scorers(folder: Path, peers_python: Path | None, stack: ExitStack) -> dict[str, Scorer]:
    """Load the files of a folder in all formats; the stack ends the peers."""
    paths = {kind: folder / f"model-{kind}.gguf" for kind in FORMATS}
    scorers: dict[str, Scorer] = {
        REFERENCE: ModelScorer(resolve_model_path(str(paths["bf16"])), Numerics(dtype="float32"))
    }
    for kind, path in paths.items():
        for name in FORMATS[kind]:
            numerics = Numerics(QuantizationConfig.from_value(name))
            scorers[f"{kind}, {name}"] = ModelScorer(resolve_model_path(str(path)), numerics)
        if peers_python is not None:
            peer = PeerScorer(peers_python, str(path), SAME_TYPE)
            stack.callback(peer.stop)
            scorers[f"{kind}, llama.cpp"] = peer
    return scorers


def main() -> None:
    """Print one row per file and engine, and one JSON line."""
    parser = make_parser(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokens", type=int, default=20480, help="score at least so many tokens (default: 20480)")
    parser.add_argument("--texts", type=Path, nargs="+", default=[], metavar="FILE", help="other texts, in UTF-8")
    parser.add_argument("--peers-python", type=Path, help="the Python of the peers' environment: llama.cpp scores too")
    args = parser.parse_args()
    missing = [kind for kind in FORMATS if not (args.folder / f"model-{kind}.gguf").is_file()]
    if missing:
        parser.error(f"FOLDER: {args.folder} has no model-{missing[0]}.gguf")
    paddle.set_device("cpu")
    select_backend("cpu")
    tokenizer = Tokenizer.from_pretrained(resolve_model_path(str(args.folder / "model-bf16.gguf")))
    texts = choose_texts(str(args.folder), args.texts, tokenizer, args.tokens)
    with ExitStack() as stack:
        rows = measure(make_scorers(args.folder, args.peers_python, stack), texts)
    tokens = sum(len(text.token_ids) for text in texts)
    details = {"tokens": tokens, "texts": [text.name for text in texts], "digest": digest(texts)}
    print_report("quality", f"{args.folder}: {tokens} tokens in {len(texts)} texts", rows, **details)


if __name__ == "__main__":
    main()
