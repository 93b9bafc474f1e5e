# SPDX-License-Identifier: Apache-2.0
"""How much do quantized weights or a quantized cache change the probabilities of text?

    python -m benchmarks.bench_quality [--model demo] [--tokens 20480] [--formats wint8 wint4] [--mixes]
        [--texts FILE ...] [--peers-python VENV/bin/python]

All formats score one text after the other. `over` names the format that a row is compared with: the same checkpoint in
float32, or for the int8 cache that in bf16. `worse_%` is the change of the perplexity, and `error_%` its standard error
if tokens were independent. `change` and `change_99%` are mean and 99 % quantile of the absolute change of a token's
log-probability, `kl` is the mean Kullback-Leibler divergence, `same_token` the share of positions with the same most
likely token. Figures are comparable within one run only.

The demonstration model scores sources of Python's library that it was not trained on. Other models score parts of
Python's license, language reference and library sources, and of docs/; --texts names other UTF-8 files. With
--peers-python, llama.cpp scores the same tokens in its formats (benchmarks/peers/README.md).

The weights of a GGUF file are scored as they are stored, by both engines, and in float32. All other formats begin with
a checkpoint that holds the same values in bf16.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import paddle
from numpy.typing import NDArray

from benchmarks.peers.gguf_files import ARCHITECTURES, write_safetensors
from benchmarks.peers.worker_process import WorkerProcess
from benchmarks.quality_figures import Figures, Logprobs, log_softmax
from benchmarks.quality_texts import WINDOW, Text, demo_texts, digest, installed_texts, texts_of_files
from benchmarks.report import ROOT, Row, make_parser, print_report
from fastdeploy.config.model_config import DType, ModelConfig
from fastdeploy.config.quantization import FORMATS, QuantizationConfig
from fastdeploy.detokenize.tokenizer import Tokenizer
from fastdeploy.gguf.folder import find_gguf
from fastdeploy.hub.model_path import resolve_model_path
from fastdeploy.models.files import open_files
from fastdeploy.models.loader import load_model
from fastdeploy.ops.backends.cpu import library
from fastdeploy.ops.batch_index import BatchIndex
from fastdeploy.ops.buffer import HostBuffer
from fastdeploy.ops.caches import allocate_cache
from fastdeploy.ops.registry import select_backend

BLOCK_SIZE = 64
REFERENCE, UNQUANTIZED, CACHE, AS_STORED = "float32", "bf16", "int8 cache", "as stored"
MIXES = {"wint4, head too": {"attention": "wint4", "mlp": "wint4", "head": "wint4"}}
PEERS = {name: f"llama.cpp {name.upper()}" for name in ("q8_0", "q4_0", "q4_1")}
SAME_FILE = {"as_stored": f"llama.cpp {AS_STORED}"}
NONE = QuantizationConfig.from_value("none")


@dataclass(frozen=True)
class Numerics:
    """The formats of a model's weights, and of its keys and values."""

    quantization: QuantizationConfig = NONE
    kv_cache_dtype: str = "auto"
    dtype: DType = "bfloat16"


class Scorer(Protocol):
    """A checkpoint in one format."""

    weights_mib: float

    def logits(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Return the logits after each token of a text but the last, [tokens - 1, vocab_size]."""


class ModelScorer:
    """A checkpoint in one of this engine's formats."""

    def __init__(self, path: str, numerics: Numerics) -> None:
        config = ModelConfig.from_pretrained(path, dtype=numerics.dtype, kv_cache_dtype=numerics.kv_cache_dtype)
        self._model = load_model(config, max_rows=WINDOW, max_model_len=WINDOW, quantization=numerics.quantization)
        self.weights_mib = self._model.num_weight_bytes / 2**20
        num_blocks, spec = -(-WINDOW // BLOCK_SIZE), config.cache_spec
        self._caches = [allocate_cache(num_blocks, BLOCK_SIZE, spec) for _ in range(self._model.num_layers)]
        self._batch = BatchIndex(WINDOW, 1, num_blocks, BLOCK_SIZE)
        self._token_ids = HostBuffer(WINDOW, "int32")

    def logits(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Return the logits after each token of a text but the last."""
        count = np.array([len(token_ids)], np.int32)
        blocks = np.arange(-(-len(token_ids) // BLOCK_SIZE), dtype=np.int32)
        metadata = self._batch.fill(count, np.zeros(1, np.int32), count, [blocks])
        self._token_ids.array[: len(token_ids)] = token_ids
        hidden = self._model.forward(self._token_ids.tensor, metadata, self._caches)
        logits = paddle.zeros([len(token_ids), self._model.vocab_size], "float32")
        self._model.compute_logits(hidden, len(token_ids), logits)
        return np.array(logits.numpy()[:-1])


class PeerScorer:
    """A checkpoint, or a GGUF file, in one of llama.cpp's formats, in a process of its own."""

    def __init__(self, python: Path, path: str, kind: str) -> None:
        script = ROOT / "benchmarks/peers/llama_cpp_scorer.py"
        environment = {"PEERS_THREADS": str(library.num_threads())}
        self._process = WorkerProcess([str(python), str(script), path, kind], environment)
        self.weights_mib: float = self._process.ready["weights_mib"]

    def logits(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Return the logits after each token of a text but the last."""
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "logits.npy"
            self._process.ask({"token_ids": list(token_ids), "file": str(file)})
            logits: NDArray[np.float32] = np.load(file)
        return logits

    def stop(self) -> None:
        """End the process."""
        self._process.stop()


def measure(scorers: Mapping[str, Scorer], texts: Sequence[Text]) -> list[Row]:
    """Score each text in all formats, REFERENCE and UNQUANTIZED first, and return a row per format."""
    figures = {name: Figures() for name in scorers}
    for number, text in enumerate(texts, 1):
        print(f"{number} of {len(texts)}: {text.name}", file=sys.stderr, flush=True)
        references: dict[str, Logprobs] = {}
        for name, scorer in scorers.items():
            logprobs = log_softmax(scorer.logits(text.token_ids))
            if name in (REFERENCE, UNQUANTIZED):
                references[name] = logprobs
            figures[name].add(references[compared_with(name)], logprobs, np.array(text.token_ids[1:]))
    return [
        {"format": name, "over": compared_with(name), **figures[name].row(), "weights_mib": scorer.weights_mib}
        for name, scorer in scorers.items()
    ]


def compared_with(name: str) -> str:
    """Return the format that is the baseline of a format."""
    return UNQUANTIZED if name == CACHE else REFERENCE


def formats(names: Sequence[str], mixes: bool, stores_codes: bool) -> dict[str, Numerics]:
    """Return what is measured: the baselines, the cache, and the weight formats of these names.

    Args:
        stores_codes: whether the checkpoint has quantized weights of its own, which are measured, too.
    """
    found = {REFERENCE: Numerics(dtype="float32"), UNQUANTIZED: Numerics(), CACHE: Numerics(kv_cache_dtype="int8")}
    if stores_codes:
        found[AS_STORED] = Numerics(QuantizationConfig())
    values = {**{name: name for name in names}, **(MIXES if mixes else {})}
    return found | {name: Numerics(QuantizationConfig.from_value(value)) for name, value in values.items()}


def peers(is_gguf: bool) -> dict[str, str]:
    """Return the formats of llama.cpp that are measured: argument of the peer -> name in the table."""
    return {**(SAME_FILE if is_gguf else {}), **PEERS}


def choose_texts(model: str, files: Sequence[Path], tokenizer: Tokenizer, num_tokens: int) -> list[Text]:
    """Return the texts that a model scores."""
    if files:
        return texts_of_files(tokenizer, files, num_tokens)
    return (demo_texts if model == "demo" else installed_texts)(tokenizer, num_tokens)


def architecture(path: str) -> str:
    """Return the architecture that config.json names."""
    config = json.loads((Path(path) / "config.json").read_text(encoding="utf-8"))
    return str(config["architectures"][0])


def in_bf16(path: str, folder: str) -> str:
    """Write a checkpoint with the values of a GGUF file in bf16 into an empty folder; return the folder.

    Args:
        path: the folder that was made from the GGUF file.
    """
    tensors = open_files(Path(path), "bfloat16")
    bits = {name: tensors.read(name).astype("bfloat16").numpy() for name in tensors.shapes}
    write_safetensors(Path(folder) / "model.safetensors", bits)
    config = json.loads((Path(path) / "config.json").read_text(encoding="utf-8"))
    config.pop("quantization_config", None)
    (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def main() -> None:
    """Print one row per format and one JSON line."""
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="demo", help="directory, GGUF file, smollm2 or demo (default: demo)")
    parser.add_argument("--tokens", type=int, default=20480, help="score at least so many tokens (default: 20480)")
    parser.add_argument("--formats", nargs="+", choices=FORMATS[1:], default=FORMATS[1:], help="(default: all)")
    parser.add_argument("--mixes", action="store_true", help="also four bits in the head")
    parser.add_argument("--texts", type=Path, nargs="+", default=[], metavar="FILE", help="other texts, in UTF-8")
    parser.add_argument("--peers-python", type=Path, help="the Python of the peers' environment: llama.cpp scores too")
    args = parser.parse_args()
    paddle.set_device("cpu")
    select_backend("cpu")
    path = resolve_model_path(args.model)
    file = find_gguf(Path(path))
    if args.peers_python and (name := architecture(path)) not in ARCHITECTURES:
        parser.error(f"--peers-python: expected one of {', '.join(ARCHITECTURES)}, got {name}")
    try:
        texts = choose_texts(args.model, args.texts, Tokenizer.from_pretrained(path), args.tokens)
    except (OSError, UnicodeDecodeError) as error:
        parser.error(f"--texts: {error}")
    if not texts:
        parser.error("--texts: expected at least two tokens")
    with ExitStack() as stack:
        plain = path if file is None else in_bf16(path, stack.enter_context(tempfile.TemporaryDirectory()))
        scorers: dict[str, Scorer] = {
            name: ModelScorer(path if name in (REFERENCE, AS_STORED) else plain, numerics)
            for name, numerics in formats(args.formats, args.mixes, file is not None).items()
        }
        for kind, name in peers(file is not None).items() if args.peers_python else ():
            source = str(file.path) if file is not None and kind in SAME_FILE else plain
            peer = PeerScorer(args.peers_python, source, kind)
            stack.callback(peer.stop)
            scorers[name] = peer
        rows = measure(scorers, texts)
    tokens = sum(len(text.token_ids) for text in texts)
    details = {"tokens": tokens, "texts": [text.name for text in texts], "digest": digest(texts)}
    print_report("quality", f"{args.model}: {tokens} tokens in {len(texts)} texts", rows, model=args.model, **details)


if __name__ == "__main__":
    main()
