# SPDX-License-Identifier: Apache-2.0
"""Losses of the draft heads against the main model's distributions."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from demo_model.heads import Eagle, Eagle3, Medusa, MLPSpeculator, unroll
from demo_model.model import Decoder
from demo_model.mtp import teacher_target

EAGLE_NOISE = 0.1  # uniform, on the states that EAGLE reads in training
EAGLE_TOKEN_WEIGHT = 0.1  # of the cross-entropy beside the distance of states
EAGLE3_STEPS = 5
STEP_DECAY = 0.8  # weight of each step relative to the one before


def target_logits(decoder: Decoder, normed: Tensor) -> Tensor:
    """Returns the main model's logits after each state, float32 without gradient."""
    with torch.no_grad():
        return decoder.logits(normed).float()


def cross_entropy(target: Tensor, logits: Tensor) -> Tensor:
    """Returns the cross-entropy of each row, `[N]`, from probabilities and logits `[N, V]`."""
    return -(target * logits.float().log_softmax(-1)).sum(-1)


def eagle_loss(head: Eagle, decoder: Decoder, tokens: Tensor, normed: Tensor, taps: Tensor) -> Tensor:
    """Returns EAGLE's loss as published: one step, the distance of states and a little cross-entropy."""
    noisy = normed + torch.empty_like(normed).uniform_(-EAGLE_NOISE, EAGLE_NOISE)
    state = unroll(head, decoder, tokens, head.start(noisy, taps), 1)[0]
    distance = F.smooth_l1_loss(state.float(), normed[:, 1:].float())
    target = target_logits(decoder, normed[:, 1:]).softmax(-1).flatten(0, 1)
    return distance + EAGLE_TOKEN_WEIGHT * cross_entropy(target, head.logits(state, decoder).flatten(0, 1)).mean()


def eagle3_loss(head: Eagle3, decoder: Decoder, tokens: Tensor, normed: Tensor, taps: Tensor) -> Tensor:
    """Returns EAGLE-3's loss: cross-entropy of unrolled steps on the draft vocabulary.

    Rows are left out where the main model's best token is not in that vocabulary.
    """
    logits = target_logits(decoder, normed[:, 1:])
    restricted = logits[..., head.draft_ids]
    target = restricted.softmax(-1).flatten(0, 1)
    counts = (restricted.amax(-1) == logits.amax(-1)).float()
    total = normed.new_zeros((), dtype=torch.float32)
    for step, state in enumerate(unroll(head, decoder, tokens, head.start(normed, taps), EAGLE3_STEPS)):
        losses = cross_entropy(target, head.draft_logits(state).flatten(0, 1)).view(counts.shape)
        share = counts[:, step:].sum().clamp_min(1.0)
        total = total + STEP_DECAY**step * (losses * counts)[:, step:].sum() / share
    return total


def mlp_loss(head: MLPSpeculator, decoder: Decoder, tokens: Tensor, normed: Tensor, taps: Tensor) -> Tensor:
    """Returns the MLP speculator's loss: the mean cross-entropy of its drafts along given tokens."""
    total = normed.new_zeros((), dtype=torch.float32)
    states = head.states(tokens, normed)
    for i, state in enumerate(states):
        target = teacher_target(target_logits(decoder, normed[:, i + 1 : i + 1 + state.shape[1]]).flatten(0, 1))
        total = total + cross_entropy(target, head.lm_head(state).flatten(0, 1)).mean() / len(states)
    return total


def medusa_loss(head: Medusa, decoder: Decoder, tokens: Tensor, normed: Tensor, taps: Tensor) -> Tensor:
    """Returns Medusa's loss: cross-entropy per head, later heads weighing less."""
    total = normed.new_zeros((), dtype=torch.float32)
    for i, state in enumerate(head.states(normed)):
        target = teacher_target(target_logits(decoder, normed[:, i + 1 :]).flatten(0, 1))
        logits = decoder.logits(state[:, : -(i + 1)]).flatten(0, 1)
        total = total + STEP_DECAY**i * cross_entropy(target, logits).mean()
    return total
