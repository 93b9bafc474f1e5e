# SPDX-License-Identifier: Apache-2.0
"""The cards of the draft heads."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from demo_model.card import last_progress, million_parameters, share_line
from demo_model.head_losses import EAGLE3_STEPS, EAGLE_NOISE, EAGLE_TOKEN_WEIGHT, STEP_DECAY
from demo_model.head_rows import TAPS
from demo_model.heads import DRAFT_VOCAB_SIZE, MEDUSA_HEADS, MLP_DRAFTS, MLP_WIDTH
from demo_model.heads_evaluate import HeadFigures

CARD = """\
# {title} of the demonstration model

A trained draft head of {parameters_m:.1f} million parameters for the [demonstration model](../README.md), in the form
in which such heads are published.
{form}

| | |
| --- | --- |
| drafts accepted at draft passes 1 / 2 / 3 | {all} |
| the same, within the first 32 tokens of a continuation | **{early}** |
{taps}
Shares are of all attempts, along greedy continuations of held-out function heads; the card of the model says how they
are counted.

## Training

`python scripts/train_demo_model.py train-heads --heads {name} --work-dir DIR`; {tokens_m:.1f} M tokens in
{steps:.0f} steps. A larger `--steps` continues it. The rows are those of the model's MTP layer: two thirds greedy
continuations of the model, the others training text, with the states of the exported checkpoint.
{loss}
"""
TAPS_LINES = """\
| the same, with taps of one layer before | {below} |
| the same, with taps of one layer after | {above} |
"""
TITLES = {"eagle": "EAGLE head", "eagle3": "EAGLE-3 head", "mlp": "MLP speculator", "medusa": "Medusa heads"}
FORMS = {
    "eagle": "Embedding and head are the model's; rotary pairs are halves of a head, as in every Llama file.",
    "eagle3": f"It reads the inputs of the layers {', '.join(map(str, TAPS))} and drafts from the "
    f"{DRAFT_VOCAB_SIZE:,} tokens that the model emits most often.\nThe embedding is the model's; rotary pairs are "
    "halves of a head, as in every Llama file.",
    "mlp": f"It makes {MLP_DRAFTS} drafts; inner width {MLP_WIDTH}, tied weights, scaled input.",
    "medusa": f"It has {MEDUSA_HEADS} heads of one residual block each and uses the model's own head (vLLM's form, "
    "`original_lm_head`).",
}
DISTILLED = "the model's distribution (half of the weight on its most probable token)"
LOSSES = {
    "eagle": f"The loss is as published: one step, smooth L1 distance of states plus {EAGLE_TOKEN_WEIGHT} times the "
    f"cross-entropy, uniform\nnoise of {EAGLE_NOISE} on the states. Recycled states drift, so that acceptance falls "
    "with depth.",
    "eagle3": "The loss is the cross-entropy against the model's probabilities on the draft vocabulary, over "
    f"{EAGLE3_STEPS} unrolled\nsteps, each with {STEP_DECAY} times the weight of the one before.",
    "mlp": f"The loss is the mean cross-entropy of the drafts against\n{DISTILLED}.",
    "medusa": f"The loss is the cross-entropy of each head against\n{DISTILLED}, each head with {STEP_DECAY} times\n"
    "the weight of the one before.",
}


def write_head_card(name: str, head: nn.Module, figures: HeadFigures, work_dir: Path, folder: Path) -> None:
    """Writes `README.md` of a head from the log of its training and its figures."""
    below, above = figures.early_taps_below, figures.early_taps_above
    has_taps = below is not None
    progress = last_progress(work_dir / f"{name}_log.jsonl")
    text = CARD.format(
        name=name,
        title=TITLES[name],
        form=FORMS[name],
        loss=LOSSES[name],
        parameters_m=million_parameters(head),
        all=share_line(figures.acceptance),
        early=share_line(figures.acceptance_early),
        taps=TAPS_LINES.format(below=share_line(below), above=share_line(above)) if has_taps else "",
        steps=progress["steps"],
        tokens_m=progress["tokens_m"],
    )
    (folder / "README.md").write_text(text)
