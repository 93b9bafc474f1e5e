# SPDX-License-Identifier: Apache-2.0
"""Self-distillation of the MTP layer and of the draft model.

Both learn from one set of rows: real training text and greedy continuations of the main model, with the main model's
final-norm states stored beside the tokens. Slot s of a row holds token x_s; whatever predicts x_{s+1} there is trained
towards the main model's own distribution after x_0 .. x_s.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from demo_model.data import PackedTokens
from demo_model.experts import FLOAT32_PARAMETERS
from demo_model.generate import greedy_continuations
from demo_model.model import DRAFT_SHAPE, Decoder, DecoderLayer, MTPLayer, compiled, default_device
from demo_model.optim import TimeSchedule
from demo_model.trunk import DENSE, Budget, LoopConfig, Stage, TrainingLoop, Variant

NUM_STEPS = 3
STEP_WEIGHTS = (1.0, 0.7, 0.5)  # position-decaying loss, as in FastMTP (arXiv 2509.18362)
DISTILLATION_SCHEDULE = TimeSchedule(warmup_steps=20, decay_from=0.4)
HARD_SHARE = 0.5  # of the target that sits on the main model's most probable token

Student = TypeVar("Student", bound=nn.Module)


@dataclass(frozen=True)
class DistillationPlan:
    """How many rows of which kind the distillation set holds."""

    num_generated: int = 640
    num_real: int = 320
    prompt_length: int = 128
    row_length: int = 384
    batch: int = 96


def shift(x: Tensor, places: int) -> Tensor:
    """Moves dimension 2 of `[B, G, T, E]` right by `places`, filling with zeros."""
    return F.pad(x, (0, 0, places, 0))[:, :, : x.shape[2]] if places else x


def rollout_attention(query: Tensor, first: tuple[Tensor, Tensor], later: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Attends as the drafter does at its step k = 1 + len(later).

    Args:
        query: `[B, H, T, E]`, one per slot.
        first: keys and values `[B, G, T, E]` that come from the target's states. The drafter at slot s started from
            slot s - k + 1, so that only these up to that slot exist.
        later: keys and values of steps 2 .. k by slot; step j belongs to slot s - k + j.
    """
    size, num_heads, length, width = query.shape
    num_groups = first[0].shape[1]
    shared = (size, num_groups, num_heads // num_groups * length, width)
    back = len(later)
    scores = torch.matmul(query.reshape(shared), first[0].transpose(2, 3)).float()
    scores = scores.view(size, num_groups, -1, length, length)
    slots = torch.arange(length, device=query.device)
    scores = scores.masked_fill(slots[None, :] > (slots[:, None] - back).clamp_min(0), -torch.inf)
    grouped = query.view(size, num_groups, -1, length, width).float()
    moved = [(shift(key, back - 1 - i), shift(value, back - 1 - i)) for i, (key, value) in enumerate(later)]
    own = [(grouped * key[:, :, None].float()).sum(-1, keepdim=True) for key, _ in moved]
    weights = (torch.cat((scores, *own), dim=-1) * width**-0.5).softmax(-1)
    out = torch.matmul(weights[..., :length].to(query.dtype).reshape(*shared[:3], length), first[1])
    out = out.view(size, num_groups, -1, length, width)
    for i, (_, value) in enumerate(moved):
        out = out + weights[..., length + i, None].to(query.dtype) * value[:, :, None]
    return out.reshape(query.shape)


def rollout_layer(
    layer: DecoderLayer,
    x: Tensor,
    tables: tuple[Tensor, Tensor],
    first: tuple[Tensor, Tensor] | None,
    later: list[tuple[Tensor, Tensor]],
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Runs the MTP block at one step over all slots `[B, T, D]`; returns its output and this step's keys and values."""
    normed = layer.input_layernorm(x)
    key_value = layer.self_attn.keys_values(normed, *tables)
    query = layer.self_attn.queries(normed, *tables)
    if first is None:
        attended = rollout_attention(query, key_value, [])
    else:
        attended = rollout_attention(query, first, [*later, key_value])
    x = x + layer.self_attn.o_proj(attended.transpose(1, 2).flatten(2))
    return x + layer.mlp(layer.post_attention_layernorm(x)), key_value


def rollout(mtp: MTPLayer, decoder: Decoder, tokens: Tensor, hidden: Tensor) -> list[Tensor]:
    """Runs the MTP layer recursively along given tokens, from every slot at once.

    Args:
        tokens: `[B, L]`.
        hidden: the main model's final-norm states at those tokens, `[B, L, D]`.

    Returns:
        Per step k the normed states `[B, L - 1, D]` at slots 1 .. L - 1. The state at slot s comes from a draft that
        started at slot s - k + 1; the first k - 1 slots of step k are meaningless.
    """
    num_slots = tokens.shape[1]
    tables = decoder.cos[1:num_slots], decoder.sin[1:num_slots]
    embedded = decoder.embed(tokens[:, 1:], hidden.dtype)
    source, states = hidden[:, :-1], []
    first: tuple[Tensor, Tensor] | None = None
    later: list[tuple[Tensor, Tensor]] = []
    for _ in range(NUM_STEPS):
        out, key_value = rollout_layer(mtp.block, mtp.mix(embedded, source), tables, first, later)
        state = decoder.norm(out)
        states.append(state)
        source = F.pad(state, (0, 0, 1, 0))[:, :-1]
        if first is None:
            first = key_value
        else:
            later.append(key_value)
    return states


def teacher_target(teacher_logits: Tensor) -> Tensor:
    """Mixes the main model's distribution with its most probable token: `[N, V]` float32."""
    soft = teacher_logits.softmax(-1) * (1 - HARD_SHARE)
    return soft.scatter_add(1, teacher_logits.argmax(-1, keepdim=True), torch.full_like(soft[:, :1], HARD_SHARE))


def distillation_loss(states: list[Tensor], embedding: Tensor, hidden: Tensor, head: Tensor) -> Tensor:
    """Returns the weighted mean cross-entropy of all steps' states against the main model's target.

    Args:
        states: per step `[B, T, D']`.
        embedding: the student's head, `[V, D']`.
        hidden: the main model's states at the same slots, `[B, T, D]`.
        head: the main model's head, `[V, D]`.
    """
    total = hidden.new_zeros((), dtype=torch.float32)
    with torch.no_grad():
        target = teacher_target(F.linear(hidden, head.to(hidden.dtype)).float().flatten(0, 1))
    for step, state in enumerate(states):
        logits = F.linear(state, embedding.to(state.dtype)).float().flatten(0, 1)
        losses = -(target * logits.log_softmax(-1)).sum(-1).view(state.shape[:2])
        total = total + STEP_WEIGHTS[step] * losses[:, step:].mean()
    return total


class DistillationRows(nn.Module):
    """Rows of tokens with the frozen main model's states, reached by row number."""

    tokens: Tensor
    hidden: Tensor

    def __init__(self, tokens: Tensor, hidden: Tensor) -> None:
        super().__init__()
        self.register_buffer("tokens", tokens, persistent=False)
        self.register_buffer("hidden", hidden, persistent=False)

    def pick(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Returns tokens `[B, L]` int64 and states `[B, L, D]` of rows `[B, 1]`."""
        return self.tokens[rows[:, 0]].long(), self.hidden[rows[:, 0]]


class MTPTask(nn.Module):
    """Loss of the MTP layer over stored rows."""

    def __init__(self, decoder: Decoder, mtp: MTPLayer, rows: DistillationRows) -> None:
        super().__init__()
        self.decoder, self.mtp, self.rows = decoder.requires_grad_(False), mtp, rows

    def forward(self, row_numbers: Tensor) -> Tensor:
        """Maps row numbers `[B, 1]` to the distillation loss."""
        tokens, hidden = self.rows.pick(row_numbers)
        return compiled(mtp_loss)(self.mtp, self.decoder, tokens, hidden)


def mtp_loss(mtp: MTPLayer, decoder: Decoder, tokens: Tensor, hidden: Tensor) -> Tensor:
    """Returns the loss of all drafting steps at all slots."""
    head = decoder.embed_tokens.weight
    return distillation_loss(rollout(mtp, decoder, tokens, hidden), head, hidden[:, 1:], head)


class DraftTask(nn.Module):
    """Loss of the draft model over stored rows."""

    def __init__(self, decoder: Decoder, draft: Decoder, rows: DistillationRows) -> None:
        super().__init__()
        self.decoder, self.draft, self.rows = decoder.requires_grad_(False), draft, rows

    def forward(self, row_numbers: Tensor) -> Tensor:
        """Maps row numbers `[B, 1]` to the distillation loss."""
        tokens, hidden = self.rows.pick(row_numbers)
        states = self.draft.hidden(tokens, torch.bfloat16)
        embedding, head = self.draft.embed_tokens.weight, self.decoder.embed_tokens.weight
        return compiled(distillation_loss)([states], embedding, hidden, head)


class RowNumbers:
    """Stands in for `PackedTokens` where the rows are stored with the task."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows

    def epoch(self, index: int, row_length: int) -> np.ndarray:
        """Returns all row numbers in a new order, `[num_rows, 1]`; `row_length` is that of the stored rows."""
        return np.random.default_rng((3, index)).permutation(self.num_rows)[:, None]


def load_trunk(work_dir: Path, variant: Variant) -> Decoder:
    """Returns the trained main model with its parameters rounded to bfloat16, as they are exported."""
    state = torch.load(work_dir / f"{variant.trunk}.pt", weights_only=True, map_location="cpu")["task"]
    decoder = Decoder(variant.shape)
    decoder.load_state_dict({name.removeprefix("decoder."): value for name, value in state.items()})
    rounded = in_bfloat16(decoder)
    decoder.load_state_dict(rounded.state_dict())
    return decoder.requires_grad_(False)


def in_bfloat16(decoder: Decoder) -> Decoder:
    """Returns a copy with bfloat16 parameters, which spares a cast at each use; tables and routers stay float32."""
    clone = copy.deepcopy(decoder)
    for name, param in clone.named_parameters():
        if not name.endswith(FLOAT32_PARAMETERS):
            param.data = param.data.bfloat16()
    return clone


@torch.inference_mode()
def build_rows(decoder: Decoder, work_dir: Path, plan: DistillationPlan) -> DistillationRows:
    """Generates continuations, adds real text and stores the main model's states of all of it."""
    packed = PackedTokens(work_dir / "train.npz", seed=4).epoch(0, plan.row_length - 1)
    rows = torch.from_numpy(packed[: plan.num_generated + plan.num_real].astype("int64")).to(default_device())
    lean = in_bfloat16(decoder).to(default_device())
    parts = []
    for start in range(0, plan.num_generated, plan.batch):
        prompts = rows[start : start + plan.batch, : plan.prompt_length]
        new = greedy_continuations(lean, prompts, plan.row_length - plan.prompt_length, torch.bfloat16)
        parts.append(torch.cat((prompts, new), dim=1))
        print(f"generated {start + len(prompts)} of {plan.num_generated} rows", flush=True)
    tokens = torch.cat((*parts, rows[plan.num_generated :]))
    hidden = torch.cat([lean.hidden(part, torch.bfloat16) for part in tokens.split(4)])
    return DistillationRows(tokens.to("cpu", torch.int32), hidden.cpu())


def stored_rows(decoder: Decoder, work_dir: Path, plan: DistillationPlan, variant: Variant) -> DistillationRows:
    """Returns the distillation set, built once per trained trunk."""
    path, trunk = work_dir / f"{variant.distillation}.pt", work_dir / f"{variant.trunk}.pt"
    if not path.exists() or path.stat().st_mtime < trunk.stat().st_mtime:
        rows = build_rows(decoder, work_dir, plan)
        torch.save({"tokens": rows.tokens, "hidden": rows.hidden}, path)
    state = torch.load(path, weights_only=True)
    return DistillationRows(state["tokens"], state["hidden"])


def train_mtp(work_dir: Path, budget: Budget, num_workers: int, plan: DistillationPlan, variant: Variant) -> None:
    """Trains the MTP layer of a finished main model."""
    torch.manual_seed(1)
    decoder = load_trunk(work_dir, variant)
    rows = stored_rows(decoder, work_dir, plan, variant)
    task = MTPTask(decoder, MTPLayer(decoder.shape), rows)
    stages = (Stage(1.0, plan.row_length, 8, 2),)
    config = LoopConfig(variant.mtp, work_dir, budget, stages, 0.02, 3e-3, DISTILLATION_SCHEDULE, num_workers)
    TrainingLoop(config, task, RowNumbers(len(rows.tokens))).run()


def train_draft(work_dir: Path, budget: Budget, num_workers: int, plan: DistillationPlan) -> None:
    """Trains the draft model on the dense main model's distributions."""
    torch.manual_seed(2)
    decoder = load_trunk(work_dir, DENSE)
    rows = stored_rows(decoder, work_dir, plan, DENSE)
    task = DraftTask(decoder, Decoder(DRAFT_SHAPE), rows)
    stages = (Stage(1.0, plan.row_length, 8, 4),)
    config = LoopConfig("draft", work_dir, budget, stages, 0.02, 4e-3, DISTILLATION_SCHEDULE, num_workers)
    TrainingLoop(config, task, RowNumbers(len(rows.tokens))).run()


def load_student(path: Path, prefix: str, module: Student) -> Student:
    """Fills a module from the training state at `path`, whose names for it begin with `prefix`."""
    state = torch.load(path, weights_only=True, map_location="cpu")["task"]
    module.load_state_dict({k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)})
    return module


def load_mtp(work_dir: Path, variant: Variant) -> MTPLayer:
    """Returns the trained MTP layer of a main model."""
    return load_student(work_dir / f"{variant.mtp}.pt", "mtp.", MTPLayer(variant.shape))


def load_draft(work_dir: Path) -> Decoder:
    """Returns the trained draft model."""
    return load_student(work_dir / "draft.pt", "draft.", Decoder(DRAFT_SHAPE))
