# SPDX-License-Identifier: Apache-2.0
"""Pre-training of the main models, and the loop that all trainings share."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from demo_model.data import PackedTokens
from demo_model.model import MOE_SHAPE, Decoder, ModelShape, compiled, default_device
from demo_model.optim import Optimizers, TimeSchedule
from demo_model.parallel import GradientPool

SAVE_INTERVAL_S = 240.0


@dataclass(frozen=True)
class Variant:
    """One of the two main models: its shape, and the names of its training states in the work folder."""

    shape: ModelShape
    trunk: str
    mtp: str
    distillation: str


DENSE = Variant(ModelShape(), "trunk", "mtp", "distillation")
MOE = Variant(MOE_SHAPE, "moe", "moe_mtp", "moe_distillation")


@dataclass(frozen=True)
class Stage:
    """Part of a training with one row length; it lasts until the share `until` of the budget is spent."""

    until: float
    row_length: int
    rows_per_batch: int
    micro_batch: int


@dataclass(frozen=True)
class Budget:
    """How long a training lasts, over all its sessions: seconds of work, or batches where `steps` is given.

    Seconds fit a machine of one's own. Steps give the same training on a machine that other work slows down.
    """

    seconds: float = 0.0
    steps: int | None = None

    def spent(self, progress: Progress) -> float:
        """Returns the share that is used up."""
        return progress.spent_s / self.seconds if self.steps is None else progress.step / self.steps


TRUNK_STAGES = (Stage(0.50, 256, 32, 4), Stage(0.92, 512, 24, 2), Stage(1.0, 2048, 6, 1))
# Of 840 steps: 400 at a constant rate, 400 while it falls, and 40 in which only the correction biases move, so that the
# experts' loads settle.
MOE_STEPS = 840
MOE_STAGES = (
    Stage(400 / MOE_STEPS, 256, 32, 8),
    Stage(736 / MOE_STEPS, 512, 16, 4),
    Stage(800 / MOE_STEPS, 2048, 4, 1),
    Stage(1.0, 256, 32, 8),
)
MOE_SCHEDULE = TimeSchedule(decay_from=400 / MOE_STEPS, zero_from=800 / MOE_STEPS)


@dataclass
class LoopConfig:
    """What one training loop needs to know besides its task."""

    name: str
    work_dir: Path
    budget: Budget
    stages: tuple[Stage, ...]
    matrix_lr: float
    other_lr: float
    schedule: TimeSchedule = field(default_factory=TimeSchedule)
    num_workers: int = 2
    evaluate_every_s: float = 600.0


@dataclass
class Progress:
    """What a resumed training continues from; times exclude the pauses between sessions.

    Attributes:
        epoch, batch: the pass over the rows, and its batches that are done.
        processor_s: time that all processes spent computing, which other work on the machine does not lengthen.
        kept_trunk: whether the state before the rate began to fall is written.
    """

    step: int = 0
    num_tokens: int = 0
    spent_s: float = 0.0
    processor_s: float = 0.0
    epoch: int = 0
    batch: int = 0
    kept_trunk: bool = False


class RowSource(Protocol):
    """Where a training's rows come from."""

    def epoch(self, index: int, row_length: int) -> np.ndarray:
        """Returns the rows of one pass, shuffled, `[num_rows, any]` integers."""
        ...


class LanguageModelTask(nn.Module):
    """Mean next-token loss in bfloat16 over float32 parameters."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, rows: Tensor) -> Tensor:
        """Maps rows `[B, T + 1]` to the mean cross-entropy in nats per token."""
        hidden = self.decoder.hidden(rows[:, :-1], torch.bfloat16)
        return compiled(next_token_loss)(hidden, self.decoder.embed_tokens.weight, rows[:, 1:])


def next_token_loss(hidden: Tensor, embedding: Tensor, targets: Tensor) -> Tensor:
    """Returns the mean cross-entropy of states `[B, T, D]` against `targets` `[B, T]`."""
    logits = F.linear(hidden, embedding.to(hidden.dtype)).float()
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def save_atomically(state: dict, path: Path) -> None:
    """Writes a state file so that a kill in between leaves the previous one."""
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    os.replace(partial, path)


class TrainingLoop:
    """Trains one task until its budget is spent; resumes from `<name>.pt` in the work folder.

    A later session continues with a larger budget from `<name>_trunk.pt`, the state before the rate began to fall.
    """

    def __init__(
        self, config: LoopConfig, task: nn.Module, rows: RowSource, evaluate: Callable[[], float] | None = None
    ) -> None:
        self.config, self.task, self.rows, self.evaluate = config, task.to(default_device()), rows, evaluate
        self.optimizers = Optimizers(self.task, config.matrix_lr, config.other_lr, config.num_workers)
        self.progress = Progress()
        self.state_path = config.work_dir / f"{config.name}.pt"
        self.log_path = config.work_dir / f"{config.name}_log.jsonl"
        if self.state_path.exists():
            self._load()

    def _load(self) -> None:
        state = torch.load(self.state_path, weights_only=True, map_location=default_device())
        self.task.load_state_dict(state["task"])
        self.optimizers.load_state_dict(state["optimizers"])
        self.progress = Progress(**state["progress"])
        step, minutes = self.progress.step, self.progress.spent_s / 60
        print(f"resumed {self.config.name} at step {step} after {minutes:.1f} minutes", flush=True)

    def _save(self, path: Path) -> None:
        state = {
            "task": self.task.state_dict(),
            "optimizers": self.optimizers.state_dict(),
            "progress": vars(self.progress),
        }
        save_atomically(state, path)

    def _log(self, **values: float) -> None:
        line = json.dumps({key: round(value, 5) for key, value in values.items()})
        print(line, flush=True)
        with self.log_path.open("a") as log:
            log.write(line + "\n")

    @property
    def spent(self) -> float:
        """Share of the budget that is used up."""
        return self.config.budget.spent(self.progress)

    def run(self) -> None:
        """Trains through all stages."""
        config = self.config
        max_tokens = max(stage.rows_per_batch * (stage.row_length + 1) for stage in config.stages)
        pool = GradientPool(self.task, config.num_workers, max_tokens)
        for stage in config.stages:
            while self.spent < stage.until:
                self._run_epoch(pool, stage)
        self._save(self.state_path)
        self._report()
        pool.close()

    def _run_epoch(self, pool: GradientPool, stage: Stage) -> None:
        """Trains on what is left of one pass over the corpus, or until the stage ends."""
        progress = self.progress
        rows = torch.from_numpy(self.rows.epoch(progress.epoch, stage.row_length).astype("int64"))
        last_save = last_report = time.monotonic()
        for batch in rows.split(stage.rows_per_batch)[progress.batch : -1]:
            self._step(pool, batch, stage)
            progress.batch += 1
            if self.spent >= stage.until:
                break
            now = time.monotonic()
            if now - last_save > SAVE_INTERVAL_S:
                last_save = now
                self._save(self.state_path)
            if now - last_report > self.config.evaluate_every_s:
                last_report = now
                self._report()
        progress.epoch, progress.batch = progress.epoch + 1, 0

    def _step(self, pool: GradientPool, batch: Tensor, stage: Stage) -> None:
        """Trains on one batch of rows."""
        started, busy, progress = time.monotonic(), time.process_time(), self.progress
        if not progress.kept_trunk and self.spent >= self.config.schedule.decay_from:
            self._save(self.config.work_dir / f"{self.config.name}_trunk.pt")
            progress.kept_trunk = True
        loss = pool.gradients(batch, stage.micro_batch)
        self.optimizers.step(self.config.schedule.relative_lr(progress.step, self.spent))
        progress.step += 1
        num_tokens = len(batch) * stage.row_length
        progress.num_tokens += num_tokens
        seconds = time.monotonic() - started
        progress.spent_s += seconds
        progress.processor_s += time.process_time() - busy + pool.take_processor_s()
        if progress.step % 10 == 0:
            tokens_m, speed = progress.num_tokens / 1e6, num_tokens / seconds
            minutes, processor_minutes = progress.spent_s / 60, progress.processor_s / 60
            self._log(
                step=progress.step,
                loss=loss,
                tokens_m=tokens_m,
                tokens_per_s=speed,
                minutes=minutes,
                processor_minutes=processor_minutes,
            )

    def _report(self) -> None:
        if self.evaluate is not None:
            self._log(step=self.progress.step, held_out_loss=self.evaluate(), minutes=self.progress.spent_s / 60)


@torch.no_grad()
def held_out_loss(task: nn.Module, work_dir: Path, num_rows: int = 64, row_length: int = 512) -> float:
    """Returns the task's mean loss over a fixed sample of held-out rows."""
    rows = PackedTokens(work_dir / "held_out.npz", seed=2).epoch(0, row_length)[:num_rows]
    batches = torch.from_numpy(rows.astype("int64")).to(default_device()).split(2)
    losses = [task(part).item() for part in batches]
    return sum(losses) / len(losses)


def train_trunk(work_dir: Path, budget: Budget, num_workers: int, variant: Variant) -> None:
    """Trains a main model until its budget is spent, over any number of sessions."""
    torch.manual_seed(0)
    task = LanguageModelTask(Decoder(variant.shape))
    sparse = variant.shape.num_experts > 0
    stages, schedule = (MOE_STAGES, MOE_SCHEDULE) if sparse else (TRUNK_STAGES, TimeSchedule())
    config = LoopConfig(variant.trunk, work_dir, budget, stages, 0.02, 3e-3, schedule, num_workers)
    rows = PackedTokens(work_dir / "train.npz", seed=1)
    TrainingLoop(config, task, rows, lambda: held_out_loss(task, work_dir)).run()
