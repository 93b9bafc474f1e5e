# SPDX-License-Identifier: Apache-2.0
"""Which state should later drafts of a layer for multi-token prediction read?

    python -m benchmarks.bench_mtp_states [--texts 1000] [--train-steps 300]

A layer in DeepSeek's form is trained on the demonstration model for one draft, as the authors of such models do, with
the target's head and embedding. Then its definition makes three drafts per step on continuations of other sources, and
passes on its state after `shared_head.norm` or before it. The demonstration model's final norm has nearly equal
weights. `spread` is the same model with norm weights that differ by powers of two, which the columns of the head make
up for.

The layer of the demonstration model itself, in ERNIE's form, runs in the engine with both values of `mtp_hidden_state`.
It was trained for three drafts on normed states.
"""

from __future__ import annotations

import tempfile
from itertools import islice
from pathlib import Path

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import Tensor

from benchmarks.report import Row, make_parser, print_report
from benchmarks.workloads import source_tokens
from fastdeploy.config.model_config import ModelConfig
from fastdeploy.core.request import GenerationRequest
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.detokenize.tokenizer import Tokenizer
from tests.exactness.requests import run_all
from tests.models.mtp_training import (
    DEMO,
    Counts,
    DefinedLayer,
    Tensors,
    engine_of,
    replayed_counts,
    states_of,
    target_tensors,
    texts_of,
    write_checkpoint,
)

LENGTH = 128  # tokens of a text
NUM_PROMPT_TOKENS = 48
NUM_DRAFTS = 3
NUM_SOURCE_TOKENS = 768_000  # of the sources that texts are taken from
NUM_HELD_OUT = 24
BATCH = 16
PEAK_RATE = 3e-3


def read_texts(num_texts: int) -> list[list[int]]:
    """Return texts of LENGTH tokens; few come from the same file."""
    tokenizer = Tokenizer.from_pretrained(str(DEMO))
    found: list[list[int]] = []
    for tokens in source_tokens(tokenizer, NUM_SOURCE_TOKENS):
        starts = range(0, len(tokens) - LENGTH, LENGTH)
        found.extend(tokens[start : start + LENGTH] for start in islice(starts, 8))
    np.random.default_rng(0).shuffle(found)
    return found[:num_texts]


def train_first_draft(layer: DefinedLayer, texts: list[list[int]], states: Tensor, num_steps: int) -> float:
    """Train the layer, except its head and embedding, for one draft; return the mean loss of the last steps."""
    shared = {f"{layer.names[part]}.weight" for part in ("head", "embedding")}
    weights = [weight for name, weight in layer.weights.items() if name not in shared]
    for weight in weights:
        weight.stop_gradient = False
    rate = paddle.optimizer.lr.LinearWarmup(
        paddle.optimizer.lr.PolynomialDecay(PEAK_RATE, num_steps, PEAK_RATE / 30), 20, 0.0, PEAK_RATE
    )
    adam, rng, losses = paddle.optimizer.Adam(rate, parameters=weights), np.random.default_rng(1), list[float]()
    for _ in range(num_steps):
        rows = rng.integers(0, len(texts), BATCH)
        tokens = paddle.to_tensor([texts[row] for row in rows], "int64")
        outputs = layer.states(tokens[:, 1:-1], states[paddle.to_tensor(rows)][:, :-2])
        loss = F.cross_entropy(layer.logits(outputs), tokens[:, 2:])
        loss.backward()
        adam.step()
        adam.clear_grad()
        rate.step()
        losses.append(float(loss))
    for weight in weights:
        weight.stop_gradient = True
    return float(np.mean(losses[-20:]))


def row_of(counts: Counts, **names: str) -> Row:
    """Return the shares of accepted drafts by position, and the tokens per step."""
    shares = {f"draft {i + 1}": float(counts[1, i] / counts[0, i]) for i in range(NUM_DRAFTS)}
    return {**names, **shares, "tokens per step": float(1 + counts[1].sum() / counts[0, 0])}


def measure_deepseek(
    target: str, tensors: Tensors, texts: list[list[int]], outputs: list[list[int]], num_steps: int
) -> list[Row]:
    """Train a layer on a target and return a row for each state that later drafts may read."""
    config = ModelConfig.from_pretrained(str(DEMO), dtype="float32")
    layer = DefinedLayer("deepseek", config, seed=1, target=tensors)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        write_checkpoint(model, {}, tensors)
        loss = train_first_draft(layer, texts, states_of(model, texts), num_steps)
        states = states_of(model, outputs)
    print(f"{target}: loss {loss:.3f}", flush=True)
    rows = []
    for hidden_state, name in (("normed", "after the norm"), ("raw", "before the norm")):
        layer.hidden_state = hidden_state
        counts = replayed_counts(layer, outputs, states, NUM_PROMPT_TOKENS, NUM_DRAFTS)
        rows.append(row_of(counts, form="DeepSeek", target=target, state=name))
    return rows


def measure_ernie(requests: list[GenerationRequest]) -> list[Row]:
    """Return a row for each value of `mtp_hidden_state` with the demonstration model's own layer."""
    rows = []
    for form, state in (("ernie", "normed"), ("ernie_raw", "raw")):
        engine = engine_of("demo", form, NUM_DRAFTS)
        run_all(engine, requests)
        stats = engine.stats()
        counts = np.array([stats.drafted_per_position, stats.accepted_per_position], np.int64)
        rows.append(row_of(counts, form="ERNIE", target="demo", state=state))
    return rows


def main() -> None:
    """Print a row per form, target and state."""
    parser = make_parser(__doc__)
    parser.add_argument("--texts", type=int, default=1000, help="texts of 128 tokens to train on")
    parser.add_argument("--train-steps", type=int, default=300, help="steps of 16 texts")
    args = parser.parse_args()
    texts = read_texts(args.texts + NUM_HELD_OUT)
    params = SamplingParams(temperature=0.0, max_tokens=LENGTH - NUM_PROMPT_TOKENS, ignore_eos=True)
    held_out = texts[args.texts :]
    requests = [GenerationRequest(str(i), text[:NUM_PROMPT_TOKENS], params) for i, text in enumerate(held_out)]
    rows = measure_ernie(requests)
    outputs = texts_of(requests)
    for name, tensors in (("demo", target_tensors(0)), ("spread", target_tensors(2))):
        rows += measure_deepseek(name, tensors, texts[: args.texts], outputs, args.train_steps)
    print_report("mtp_states", "accepted drafts by position, of those verified", rows)


if __name__ == "__main__":
    main()
