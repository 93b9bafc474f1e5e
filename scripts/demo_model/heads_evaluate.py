# SPDX-License-Identifier: Apache-2.0
"""How many drafts of the heads the main model accepts along its own greedy continuations."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from demo_model.evaluate import NUM_EARLY_TOKENS, HeadResults, choose_heads, continue_head
from demo_model.export import read_checkpoint
from demo_model.head_rows import TAPS, tapped_states
from demo_model.heads import Eagle, Eagle3, Medusa, MLPSpeculator, unroll
from demo_model.model import Decoder
from demo_model.mtp import NUM_STEPS


@dataclass(frozen=True)
class HeadFigures:
    """Share of attempts whose draft k and all before it were accepted, for k = 1 .. NUM_STEPS.

    Attributes:
        acceptance: over whole continuations.
        acceptance_early: within their first tokens, before they repeat themselves.
        early_taps_below, early_taps_above: the same with the taps of one layer before or after; None where the head
            has no taps.
    """

    acceptance: tuple[float, ...]
    acceptance_early: tuple[float, ...]
    early_taps_below: tuple[float, ...] | None = None
    early_taps_above: tuple[float, ...] | None = None


@torch.inference_mode()
def step_logits(head: nn.Module, decoder: Decoder, tokens: Tensor, taps: tuple[int, ...]) -> list[Tensor]:
    """Returns per step k the logits of tokens 2 + k, 3 + k, ... of a row `[1, L]`, as far as they are defined."""
    states = tapped_states(decoder, tokens, taps, torch.float32)
    normed = states[:, :, 0]
    if isinstance(head, MLPSpeculator):
        return [head.lm_head(state[0]) for state in head.states(tokens, normed)]
    if isinstance(head, Medusa):
        drafts = head.states(normed)[:NUM_STEPS]
        return [decoder.logits(state[0, : -(step + 1)]) for step, state in enumerate(drafts)]
    assert isinstance(head, Eagle | Eagle3)
    unrolled = unroll(head, decoder, tokens, head.start(normed, states[:, :, 1:].flatten(2)), NUM_STEPS)
    rows = [state[0, step:] for step, state in enumerate(unrolled)]
    return [head.logits(row, decoder) if isinstance(head, Eagle) else head.draft_logits(row) for row in rows]


def head_drafts(head: nn.Module, decoder: Decoder, tokens: list[int], taps: tuple[int, ...] = TAPS) -> np.ndarray:
    """Returns what step k would draft for each next token along `tokens`: `[NUM_STEPS, L]`, -1 where undefined."""
    drafts = np.full((NUM_STEPS, len(tokens)), -1)
    for step, logits in enumerate(step_logits(head, decoder, torch.tensor([tokens]), taps)):
        ids = logits.argmax(-1)
        ids = head.draft_ids[ids] if isinstance(head, Eagle3) else ids
        drafts[step, 1 + step : 1 + step + len(ids)] = ids.numpy()
    return drafts


def continued_heads(model_dir: Path, decoder: Decoder) -> list[tuple[list[int], int]]:
    """Returns held-out function heads with the main model's greedy continuations, and the lengths of the former."""
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    continued = [continue_head(decoder, tokenizer, head) for head in choose_heads(tokenizer)]
    return [(prompt + new, len(prompt)) for prompt, new in continued]


def head_figures(head: nn.Module, decoder: Decoder, texts: list[tuple[list[int], int]]) -> HeadFigures:
    """Measures one head along texts of the main model."""
    results, has_taps = HeadResults(), isinstance(head, Eagle3)
    shifts = (-1, 0, 1) if has_taps else (0,)
    for row, num_prompt in texts:
        for shift in shifts:
            drafts = head_drafts(head, decoder, row, tuple(tap + shift for tap in TAPS))
            results.add_drafts(f"early {shift}", drafts, row[: num_prompt + NUM_EARLY_TOKENS], num_prompt)
            if shift == 0:
                results.add_drafts("all", drafts, row, num_prompt)
    early = {shift: results.acceptance(f"early {shift}") for shift in shifts}
    return HeadFigures(results.acceptance("all"), early[0], early.get(-1), early.get(1))


def evaluate_heads(heads: dict[str, nn.Module], model_dir: Path) -> dict[str, HeadFigures]:
    """Measures heads of the main model that `model_dir` contains."""
    decoder = read_checkpoint(model_dir)[0]
    texts = continued_heads(model_dir, decoder)
    return {name: head_figures(head, decoder, texts) for name, head in heads.items()}
