# SPDX-License-Identifier: Apache-2.0
"""Rows that the draft heads learn from: tokens, with the states that the dense main model has at them.

The main model is read from the exported checkpoint, so that heads can be trained without the state of its training.
States lie in a file that is mapped, since they take 0.75 GB.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from demo_model.data import PackedTokens
from demo_model.generate import greedy_continuations
from demo_model.model import Decoder, compiled, default_device, layer_output
from demo_model.mtp import DistillationPlan, in_bfloat16

TAPS = (2, 7, 11)  # the layers whose inputs an EAGLE-3 head reads: 2, L / 2 and L - 3 of L = 14
TOKENS_FILE, STATES_FILE = "head_tokens.npy", "head_states.bin"
ROWS_AT_ONCE = 16


@functools.cache
def mapped_states(path: str, shape: tuple[int, ...]) -> Tensor:
    """Returns the bfloat16 states of a file, which each process maps once."""
    return torch.from_numpy(np.memmap(path, np.int16, "c", shape=shape)).view(torch.bfloat16)


@dataclass(frozen=True)
class HeadRows:
    """Rows of tokens with the main model's states, reached by row number.

    Attributes:
        tokens: `[R, L]` int64; the first `num_generated` rows end in greedy continuations of the main model.
        prompt_length: tokens of these rows before the continuation.
        path: file of the states `[R, L, 1 + len(TAPS), D]`: after the final norm, then at the taps.
        hidden_size: D.
    """

    tokens: np.ndarray
    num_generated: int
    prompt_length: int
    path: str
    hidden_size: int

    def pick(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns tokens `[B, L]`, states after the norm `[B, L, D]` and taps `[B, L, n D]` of rows `[B, 1]`."""
        shape = (*self.tokens.shape, 1 + len(TAPS), self.hidden_size)
        states = mapped_states(self.path, shape)[rows[:, 0].cpu()].to(rows.device)
        tokens = torch.from_numpy(self.tokens[rows[:, 0].cpu().numpy()]).to(rows.device)
        return tokens, states[:, :, 0], states[:, :, 1:].flatten(2)

    def continuations(self) -> np.ndarray:
        """Returns all tokens that the main model made."""
        return self.tokens[: self.num_generated, self.prompt_length :].flatten()


LayerRun = Callable[[nn.Module, Tensor, Tensor, Tensor], Tensor]


def tapped_states(
    decoder: Decoder, tokens: Tensor, taps: tuple[int, ...], dtype: torch.dtype, run: LayerRun = layer_output
) -> Tensor:
    """Returns states `[B, T, 1 + n, D]`: after the final norm, then at the inputs of the layers `taps`.

    Args:
        run: runs one layer.
    """
    cos, sin = decoder.cos[: tokens.shape[1]], decoder.sin[: tokens.shape[1]]
    x, inputs = decoder.embed(tokens, dtype), []
    for layer in decoder.layers:
        inputs.append(x)
        x = run(layer, x, cos, sin)
    return torch.stack([decoder.norm(x), *(inputs[tap] for tap in taps)], dim=2)


@torch.inference_mode()
def make_tokens(decoder: Decoder, work_dir: Path, plan: DistillationPlan) -> np.ndarray:
    """Returns continuations of training text by the main model, then real training text, `[R, L]`."""
    packed = PackedTokens(work_dir / "train.npz", seed=4).epoch(0, plan.row_length - 1)
    rows = torch.from_numpy(packed[: plan.num_generated + plan.num_real].astype("int64")).to(default_device())
    for start in range(0, plan.num_generated, plan.batch):
        part = rows[start : min(start + plan.batch, plan.num_generated)]
        num_new = plan.row_length - plan.prompt_length
        part[:, plan.prompt_length :] = greedy_continuations(
            decoder, part[:, : plan.prompt_length], num_new, torch.bfloat16
        )
        print(f"generated {start + len(part)} of {plan.num_generated} rows", flush=True)
    return rows.cpu().numpy()


@torch.inference_mode()
def write_states(decoder: Decoder, tokens: np.ndarray, path: Path) -> None:
    """Writes the states of all rows; a kill in between leaves no file."""
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        for part in torch.from_numpy(tokens).split(ROWS_AT_ONCE):
            run = compiled(layer_output)
            states = tapped_states(decoder, part.to(default_device()), TAPS, torch.bfloat16, run)
            file.write(states.cpu().view(torch.int16).numpy().tobytes())
    partial.replace(path)


def stored_head_rows(decoder: Decoder, work_dir: Path, plan: DistillationPlan) -> HeadRows:
    """Returns the rows of `plan`, which the first call makes and stores in the work folder."""
    lean, tokens_path, path = in_bfloat16(decoder).to(default_device()), work_dir / TOKENS_FILE, work_dir / STATES_FILE
    if not tokens_path.exists():
        path.unlink(missing_ok=True)
        np.save(tokens_path, make_tokens(lean, work_dir, plan))
    tokens = np.load(tokens_path)
    if not path.exists():
        write_states(lean, tokens, path)
    expected = (plan.num_generated + plan.num_real, plan.row_length)
    if tokens.shape != expected:
        raise ValueError(f"{tokens_path} has rows of another plan: expected {expected}, got {tokens.shape}; delete it")
    return HeadRows(tokens, plan.num_generated, plan.prompt_length, str(path), decoder.shape.hidden_size)
