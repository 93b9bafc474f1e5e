# SPDX-License-Identifier: Apache-2.0
"""The model cards and their pictures of the loss."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict
from pathlib import Path

from torch import nn

from demo_model.data import HASH_LIST, HELD_OUT_PERMILLE, VOCAB_SIZE
from demo_model.evaluate import Figures
from demo_model.experts import SparseMLP
from demo_model.model import DRAFT_SHAPE, Decoder, MTPLayer
from demo_model.moe_card import MOE_CARD
from demo_model.optim import BIAS_STEP
from demo_model.trunk import DENSE, MOE

CARD = """\
# Demonstration model

A {main_m:.1f}-million-parameter decoder in ERNIE-4.5 form with one multi-token-prediction (MTP) layer
({mtp_m:.1f} M parameters) and, in `draft/`, a draft model of {draft_m:.1f} M with the same tokenizer. It exists so that
FastDeploy can be tried, tested and measured with a real model on any machine: it continues Python source text. It is
not an assistant, and its programs are not meant to work.

| | main | draft |
| --- | --- | --- |
| layers × hidden × intermediate | {main.num_layers} × {main.hidden_size} × {main.intermediate_size} \
| {draft.num_layers} × {draft.hidden_size} × {draft.intermediate_size} |
| query / key-value heads × head size | {main.num_heads} / {main.num_kv_heads} × {main.head_dim} \
| {draft.num_heads} / {draft.num_kv_heads} × {draft.head_dim} |
| vocabulary (byte-level BPE), positions | {vocab}, {main.max_positions} | the same |
| number format, embedding | bfloat16, tied | the same |

## Figures

Printed by `python scripts/train_demo_model.py evaluate` from this checkpoint, in float32:

| | |
| --- | --- |
| held-out text | {held_out_bits_per_byte:.3f} bits per byte ({held_out_nats_per_token:.3f} nats per token) |
| function heads continued so that the text parses | **{parsed} of {num_heads}** |
| the same, cut after the last whole *logical* line | {parsed_logical} of {num_heads} |
| the files' own text under the same two cuts | {parsed_real_text} and {parsed_real_text_logical} of {num_heads} |
| share of 8-token runs that repeat earlier ones | {repeated_share:.2f} |
| MTP drafts accepted at draft passes 1 / 2 / 3 | **{mtp_line}**, {mtp_mean_accepted:.2f} tokens per attempt |
| the same, within the first 32 tokens of a continuation | {early_line} |
| draft-model drafts accepted at draft passes 1 / 2 / 3 | {draft_line}, {draft_mean_accepted:.2f} tokens per attempt |

*Heads*: {num_heads} functions of held-out files, at most five per file, drawn with a fixed seed. The prompt starts at
the top-level statement (class, function or decorator) around the head and ends with the head's last line, docstring
included.

*Continuations* are greedy, {num_new_tokens} tokens, cut after its last line break; prompt and continuation
must then pass `ast.parse`, and the continuation must hold at least one whole line. The files' own text stays below 100
because a cut can fall inside a bracket, inside a docstring or between `if ...:` and its block. A logical line
includes brackets and strings that span several lines.

*Acceptance*: speculative decoding replayed along the same continuations with three drafts per attempt; a draft counts
as accepted if it and all drafts before it equal the model's own greedy tokens; shares are of all attempts.

![training loss](loss.png)

## Data

The source text of the standard library of CPython {python} (`.py` files; tables of characters and other files that
are mostly digits left out): {train_files} files, {train_mb:.1f} MB, {train_tokens_m:.2f} M tokens for training, and
{held_files} files, {held_mb:.1f} MB, held out. A file is held out when a hash of its path says so
({permille} per thousand). `scripts/demo_model/{hash_list}` pins every file by hash; `prepare` names each file that
differs.

The library is © Python Software Foundation and others, under the PSF licence version 2; the model can repeat
passages of it. The training script and this checkpoint are published under Apache-2.0.

## Training

`python scripts/train_demo_model.py all --work-dir DIR` does all of this, on a GPU if there is one; this checkpoint
was trained on {device}.

1. Main model: {trunk_tokens_m:.1f} M tokens in {trunk_steps} steps, {trunk_minutes:.0f} minutes; Muon for matrices
   (rate 0.02), AdamW for the embedding and norms (0.003); rate constant, then linear to zero from half of the *time*
   budget on. Rows of 256, then 512, then (last 8 % of the time) 2,048 tokens, each begun with `<s>`.
   Continue it: `train --minutes MORE` with the work folder's `trunk_trunk.pt` renamed to `trunk.pt`.
2. MTP layer, main model frozen: {mtp_tokens_m:.1f} M tokens, {mtp_minutes:.0f} minutes. One layer run for three draft
   passes on its own states (FastMTP, arXiv 2509.18362), pass weights 1 / 0.7 / 0.5, cross-entropy against the main
   model's own distribution (half of the weight on its most probable token). Two thirds of the rows are the main model's
   greedy continuations of training text, the others are training text.
3. Draft model: the same target and rows, {draft_tokens_m:.1f} M tokens, {draft_minutes:.1f} minutes.

## MTP layer

At position t + 1 it reads `mtp_linear_proj([mtp_emb_norm(embed(x_t+1)) ; mtp_hidden_norm(h_t)])`, embedding first,
where h_t is the main model's state after its final norm. One decoder layer (`mtp_block`) follows, at rotary position
t + 1; the main model's final norm and head turn its output into the prediction of x_t+2. For the next draft pass
that normed output takes the place of h. Keys and values of earlier positions come from the main model's states.

## Use

Prompts are text; `<s>` goes before them (the tokenizer does it). A line break and the following indentation are one
token: end a prompt with `:` or with a line break *and* the whole indentation. The chat template renders system
messages as comments and other messages as they are: send code, and it is continued.

## Draft heads

[`eagle/`](eagle/README.md), [`eagle3/`](eagle3/README.md), [`mlp/`](mlp/README.md) and [`medusa/`](medusa/README.md)
are trained heads for this model, in the forms in which heads are published; `train-heads` makes them from this
checkpoint.

## Limits

Trained on few tokens of one library: outside of Python source its text has no meaning, and greedy continuations soon
repeat themselves (see the share above).
Rows of 2,048 tokens were a small part of the training, but held-out loss does not rise towards the end of one.
Repetition makes text easy to draft: acceptance here says little about acceptance with larger models.
"""


def last_progress(log: Path) -> dict[str, float]:
    """Returns tokens (millions), steps, minutes and processor minutes of a finished training."""
    last = [line for line in map(json.loads, log.read_text().splitlines()) if "tokens_m" in line][-1]
    return {
        "tokens_m": last["tokens_m"],
        "steps": last["step"],
        "minutes": last["minutes"],
        "processor_minutes": last["processor_minutes"],
    }


def draw_loss(log: Path, picture: Path) -> None:
    """Draws training and held-out loss over tokens as a small PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = [json.loads(line) for line in log.read_text().splitlines()]
    steps = [line for line in lines if "tokens_m" in line]
    tokens_at = {line["step"]: line["tokens_m"] for line in steps}
    held = [(tokens_at[max(s for s in tokens_at if s <= line["step"])], line["held_out_loss"]) for line in lines
            if "held_out_loss" in line and line["step"] >= min(tokens_at)]  # fmt: skip
    figure, axes = pyplot.subplots(figsize=(5.6, 3.2), dpi=90)
    axes.plot([line["tokens_m"] for line in steps], [line["loss"] for line in steps], lw=0.8, label="training")
    axes.plot(*zip(*held, strict=True), "o-", ms=3, label="held out")
    axes.set(xlabel="million tokens", ylabel="nats per token", ylim=(1.0, 5.5))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(picture)


def million_parameters(module: nn.Module) -> float:
    """Counts parameters, in millions."""
    return sum(param.numel() for param in module.parameters()) / 1e6


def active_million(decoder: Decoder) -> float:
    """Counts the parameters that one token uses, in millions."""
    shape, blocks = decoder.shape, [layer.mlp for layer in decoder.layers if isinstance(layer.mlp, SparseMLP)]
    stacks = sum(stack.numel() for block in blocks for stack in (block.gate_proj, block.up_proj, block.down_proj))
    return million_parameters(decoder) - stacks * (1 - shape.experts_per_token / shape.num_experts) / 1e6


def share_line(shares: tuple[float, ...] | None) -> str:
    """Formats shares of accepted drafts per step."""
    return " / ".join(f"{share:.2f}" for share in shares or ())


def write_card(model_dir: Path, work_dir: Path, figures: Figures, device: str) -> None:
    """Writes `README.md` and `loss.png` from the work folder's logs and an evaluation's figures."""
    sparse = figures.experts is not None
    variant = MOE if sparse else DENSE
    draw_loss(work_dir / f"{variant.trunk}_log.jsonl", model_dir / "loss.png")
    runs: dict[str, float] = {}
    for name in (variant.trunk, variant.mtp) if sparse else (variant.trunk, variant.mtp, "draft"):
        progress = last_progress(work_dir / f"{name}_log.jsonl")
        runs |= {f"{name}_{key}": value for key, value in progress.items()}
    main = Decoder(variant.shape)
    values = {
        "main": variant.shape,
        "main_m": million_parameters(main),
        "mtp_m": million_parameters(MTPLayer(variant.shape)),
        "vocab": VOCAB_SIZE,
        "python": platform.python_version(),
        "device": device,
        "mtp_line": share_line(figures.mtp_acceptance),
        "early_line": share_line(figures.mtp_acceptance_early),
    }
    own = expert_values(main, figures) if sparse else dense_values(work_dir, figures)
    card = MOE_CARD if sparse else CARD
    (model_dir / "README.md").write_text(card.format(**values, **own, **asdict(figures), **runs))


def expert_values(main: Decoder, figures: Figures) -> dict[str, object]:
    """Returns what only the card of the model with experts names."""
    assert figures.experts is not None
    return {"active_m": active_million(main), "bias_step": BIAS_STEP, **asdict(figures.experts)}


def dense_values(work_dir: Path, figures: Figures) -> dict[str, object]:
    """Returns what only the card of the dense model names."""
    corpus = json.loads((work_dir / "corpus.json").read_text())
    return {
        "draft": DRAFT_SHAPE,
        "draft_m": million_parameters(Decoder(DRAFT_SHAPE)),
        "permille": HELD_OUT_PERMILLE,
        "hash_list": HASH_LIST.name,
        "draft_line": share_line(figures.draft_acceptance),
        "train_mb": corpus["train_bytes"] / 1e6,
        "held_mb": corpus["held_out_bytes"] / 1e6,
        "train_tokens_m": corpus["train_tokens"] / 1e6,
        "train_files": corpus["train_files"],
        "held_files": corpus["held_out_files"],
    }
