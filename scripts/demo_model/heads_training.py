# SPDX-License-Identifier: Apache-2.0
"""Training of the draft heads on stored rows, and the drafts that they make along a text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from demo_model.export import read_checkpoint
from demo_model.head_losses import eagle3_loss, eagle_loss, medusa_loss, mlp_loss
from demo_model.head_rows import TAPS, HeadRows, stored_head_rows
from demo_model.heads import DRAFT_VOCAB_SIZE, Eagle, Eagle3, Medusa, MLPSpeculator
from demo_model.model import Decoder, ModelShape, compiled
from demo_model.mtp import DISTILLATION_SCHEDULE, DistillationPlan, RowNumbers, load_student
from demo_model.trunk import Budget, LoopConfig, Stage, TrainingLoop

Loss = Callable[[nn.Module, Decoder, Tensor, Tensor, Tensor], Tensor]
LOSSES: dict[str, Loss] = {"eagle": eagle_loss, "eagle3": eagle3_loss, "mlp": mlp_loss, "medusa": medusa_loss}
ROWS_PER_BATCH, ROWS_AT_ONCE = 8, 2
MATRIX_RATE, OTHER_RATE = 0.02, 3e-3


def make_head(name: str, shape: ModelShape) -> nn.Module:
    """Returns an untrained head."""
    if name == "eagle3":
        return Eagle3(shape, len(TAPS))
    return {"eagle": Eagle, "mlp": MLPSpeculator, "medusa": Medusa}[name](shape)


def frequent_ids(tokens: np.ndarray, vocab_size: int, num_ids: int) -> np.ndarray:
    """Returns the most frequent tokens in ascending order; of equally frequent ones the smaller ids."""
    counts = np.bincount(tokens, minlength=vocab_size)
    return np.sort(np.argsort(-counts, kind="stable")[:num_ids])


class HeadTask(nn.Module):
    """Loss of a head over stored rows."""

    def __init__(self, name: str, decoder: Decoder, head: nn.Module, rows: HeadRows) -> None:
        super().__init__()
        self.name, self.decoder, self.head, self.rows = name, decoder.requires_grad_(False), head, rows

    def forward(self, row_numbers: Tensor) -> Tensor:
        """Maps row numbers `[B, 1]` to the loss."""
        return compiled(LOSSES[self.name])(self.head, self.decoder, *self.rows.pick(row_numbers))


def train_head(
    name: str, model_dir: Path, work_dir: Path, budget: Budget, num_workers: int, plan: DistillationPlan
) -> None:
    """Trains a head of the main model that `model_dir` contains."""
    torch.manual_seed(3)
    decoder = read_checkpoint(model_dir)[0]
    rows = stored_head_rows(decoder.requires_grad_(False), work_dir, plan)
    head = make_head(name, decoder.shape)
    if isinstance(head, Eagle3):
        ids = frequent_ids(rows.continuations(), decoder.shape.vocab_size, DRAFT_VOCAB_SIZE)
        head.use_vocabulary(torch.from_numpy(ids), decoder)
    task = HeadTask(name, decoder, head, rows)
    stages = (Stage(1.0, plan.row_length, ROWS_PER_BATCH, ROWS_AT_ONCE),)
    config = LoopConfig(name, work_dir, budget, stages, MATRIX_RATE, OTHER_RATE, DISTILLATION_SCHEDULE, num_workers)
    TrainingLoop(config, task, RowNumbers(len(rows.tokens))).run()


def load_head(name: str, work_dir: Path, shape: ModelShape) -> nn.Module:
    """Returns a head from the state of its training, its parameters rounded to bfloat16, as they are exported."""
    head = load_student(work_dir / f"{name}.pt", "head.", make_head(name, shape))
    for param in head.parameters():
        param.data = param.data.bfloat16().float()
    return head
