# SPDX-License-Identifier: Apache-2.0
"""Muon for matrices, AdamW for the rest, and a schedule that follows the clock instead of the step count."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor, nn

# Quintic Newton-Schulz coefficients of Muon (K. Jordan, 2024): they push all singular values to about 1.
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5
MUON_BATCH = 7  # matrices of one shape per task; a stack of experts is a task of its own
TABLES = ("embed_tokens", "lm_head")  # names of matrices with a row per token, which AdamW trains
BIAS_STEP = 0.001  # of a router's correction bias after each batch


def orthogonalise(batch: Tensor) -> Tensor:
    """Replaces each matrix of `[N, rows, columns]` by about its nearest semi-orthogonal one, in bfloat16."""
    tall = batch.shape[1] > batch.shape[2]
    x = batch.mT if tall else batch
    x = (x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)).bfloat16()
    a, b, c = NEWTON_SCHULZ
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = torch.bmm(x, x.mT)
        x = a * x + torch.bmm(b * gram + c * torch.bmm(gram, gram), x)
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Momentum whose update of each matrix is orthogonalised.

    Matrices of one shape are handled in small batches, which Python threads take in turn: the operators inside are
    single-threaded, so that a delayed core holds up nothing but its own batch.
    """

    def __init__(self, params: list[nn.Parameter], lr: float, num_threads: int, momentum: float = 0.95) -> None:
        by_shape: dict[tuple[int, ...], list[nn.Parameter]] = {}
        for param in params:
            by_shape.setdefault(tuple(param.shape), []).append(param)
        super().__init__(
            [{"params": same_shape} for same_shape in by_shape.values()],
            {"lr": lr, "momentum": momentum, "weight_decay": 0.1},
        )
        self.threads = ThreadPoolExecutor(num_threads)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Applies one update to every matrix."""
        batches = []
        for group in self.param_groups:
            size = MUON_BATCH if group["params"][0].ndim == 2 else 1
            batches += [(group, group["params"][i : i + size]) for i in range(0, len(group["params"]), size)]
        for _ in self.threads.map(self._update, batches):
            pass

    @torch.no_grad()
    def _update(self, batch: tuple[dict, list[nn.Parameter]]) -> None:
        """Updates parameters of one shape: matrices, or stacks of them `[X, rows, columns]`."""
        group, params = batch
        updates = []
        for param in params:
            assert param.grad is not None
            if "velocity" not in self.state[param]:
                self.state[param]["velocity"] = torch.zeros_like(param)
            velocity = self.state[param]["velocity"]
            velocity.lerp_(param.grad, 1 - group["momentum"])
            updates.append(param.grad.lerp(velocity, group["momentum"]))
        rows, columns = params[0].shape[-2:]
        scale = group["lr"] * max(1.0, rows / columns) ** 0.5
        stacked = torch.stack(updates)
        orthogonal = orthogonalise(stacked.view(-1, rows, columns)).view(stacked.shape)
        for param, update in zip(params, orthogonal, strict=True):
            param.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update, alpha=scale)


class SignStep(torch.optim.Optimizer):
    """Moves every element by a fixed step against the sign of its gradient; for the routers' correction biases."""

    def __init__(self, params: list[nn.Parameter], step_size: float) -> None:
        super().__init__(params, {"step_size": step_size})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Applies one update to every parameter."""
        for group in self.param_groups:
            for param in group["params"]:
                assert param.grad is not None
                param.sub_(param.grad.sign(), alpha=group["step_size"])


class Optimizers:
    """The optimisers of a model, driven by one relative learning rate; correction biases keep their own step."""

    def __init__(self, module: nn.Module, matrix_lr: float, other_lr: float, num_threads: int = 1) -> None:
        named = [(name, param) for name, param in module.named_parameters() if param.requires_grad]
        biases = [param for name, param in named if name.endswith("correction_bias")]
        matrices = [param for name, param in named if param.ndim >= 2 and not any(part in name for part in TABLES)]
        taken = {id(param) for param in (*biases, *matrices)}
        others = [param for _, param in named if id(param) not in taken]
        self.parts: list[torch.optim.Optimizer] = [
            Muon(matrices, matrix_lr, num_threads),
            torch.optim.AdamW(others, other_lr, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0),
        ]
        self.base_lrs = [matrix_lr, other_lr]
        if biases:
            self.parts.append(SignStep(biases, BIAS_STEP))
            self.base_lrs.append(0.0)

    def step(self, relative_lr: float) -> None:
        """Updates all parameters at `relative_lr` times the base rates."""
        for part, base_lr in zip(self.parts, self.base_lrs, strict=True):
            for group in part.param_groups:
                group["lr"] = base_lr * relative_lr
            part.step()

    def state_dict(self) -> list[dict]:
        """Returns the optimisers' states."""
        return [part.state_dict() for part in self.parts]

    def load_state_dict(self, states: list[dict]) -> None:
        """Restores the optimisers' states."""
        for part, state in zip(self.parts, states, strict=True):
            part.load_state_dict(state)


@dataclass(frozen=True)
class TimeSchedule:
    """Constant rate after a warm-up, then linear decay to zero, as a function of the spent share of a budget.

    From the share `zero_from` on the rate is zero: only correction biases move then, since their step is fixed.
    """

    warmup_steps: int = 60
    decay_from: float = 0.5
    zero_from: float = 1.0

    def relative_lr(self, step: int, spent: float) -> float:
        """Returns the relative learning rate at `step` when the share `spent` of the budget is used up."""
        warm = min(1.0, (step + 1) / self.warmup_steps)
        left = min(1.0, max(0.0, self.zero_from - spent) / (self.zero_from - self.decay_from))
        return warm * left
