# SPDX-License-Identifier: Apache-2.0
"""Write tests/golden/glm4_moe_mtp: a layer for multi-token prediction with experts, for the golden model glm4_moe.

Run in an environment with torch and transformers 5 (neither is needed to run the tests):

    python scripts/make_golden_mtp.py

The layer is trained for one draft on texts of the model, so that drafts of these are accepted. Its tensors have the
names of GLM-4.5's files. reference.npz has log-probabilities of transformers' MtpModel in float32: of the first draft
after each of POSITIONS, and of two further drafts after the last token, each of which reads the state before it. It
also has greedy texts of the model, and the three drafts after each token of their outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from make_golden_checkpoints import GOLDEN, POSITIONS
from make_golden_experts import MARGIN, is_router, margin, routers_of, run, smallest
from safetensors.torch import save_file
from torch.nn import functional as F
from transformers import Glm4MoeForCausalLM, PreTrainedModel
from transformers.modeling_layers import MtpModel

TARGET, NAME = "glm4_moe", "glm4_moe_mtp"
NUM_SAMPLED = 32
NUM_DRAFTS = 3
NUM_REPLAYED, NUM_LEARNT, PROMPT_LEN, TEXT_LEN = 6, 3, 16, 60
MIN_MARGIN = 3e-4  # of replayed texts, in logits and in scores of experts: float32 errors are a hundredth of it


@dataclass(frozen=True)
class Training:
    """How a layer is trained.

    Attributes:
        num_drafts: for how many drafts, each of which reads the states of the one before.
        prepare: changes the random weights that it starts from.
        is_fixed: returns whether it leaves a weight as it is; it leaves embedding and head in any case.
    """

    num_steps: int = 300
    num_drafts: int = 1
    prepare: Callable[[torch.nn.Module], None] = lambda layer: None
    is_fixed: Callable[[str], bool] = is_router


def make_layer(target: PreTrainedModel, generator: torch.Generator) -> MtpModel:
    """Return a layer with random weights, whose router chooses decisively."""
    mtp = MtpModel(target, 1)
    for name, weight in (*mtp.layers.named_parameters(), *mtp.layers.named_buffers()):
        noise = torch.randn(weight.shape, generator=generator)
        if "norm" in name:
            value = 1.0 + 0.3 * noise
        elif "e_score_correction_bias" in name:
            value = 0.2 * torch.rand(weight.shape, generator=generator) - 0.1
        elif weight.ndim == 1:
            value = 0.3 * noise
        else:
            value = (1.5 if is_router(name) else 0.7) * noise / weight.shape[-1] ** 0.5
        weight.data.copy_(value)
    return mtp


def outputs(mtp: MtpModel, tokens: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    """Return the layer's states [B, T, H] after its norm for tokens 1 .. T and states 0 .. T - 1."""
    positions = torch.arange(1, tokens.shape[1] + 1)[None]
    found: torch.Tensor = mtp.forward_layer(0, states, positions, None, input_ids=tokens)
    return found


def train(
    mtp: MtpModel, target: PreTrainedModel, texts: list[list[int]], generator: torch.Generator, training: Training
) -> None:
    """Train the layer on texts and sampled ones."""
    tokens = torch.randint(0, target.config.vocab_size, (NUM_SAMPLED, 2), generator=generator)
    with torch.no_grad():
        while tokens.shape[1] < TEXT_LEN:
            probs = target(tokens, use_cache=False).logits[:, -1].mul(2.0).softmax(-1)
            tokens = torch.cat([tokens, torch.multinomial(probs, 1, generator=generator)], dim=1)
        tokens = torch.cat([tokens, torch.tensor(texts)])
        states = target.model(tokens, use_cache=False).last_hidden_state
    weights = [weight for name, weight in mtp.layers.named_parameters() if not training.is_fixed(name)]
    adam = torch.optim.Adam(weights, lr=3e-3)
    for _ in range(training.num_steps):
        loss, inputs = torch.zeros(()), states[:, :-1]
        for first in range(1, training.num_drafts + 1):
            inputs = outputs(mtp, tokens[:, first:-1], inputs[:, :-1])
            loss = loss + F.cross_entropy(mtp.shared_head(inputs).flatten(0, 1), tokens[:, first + 1 :].flatten())
        adam.zero_grad()
        loss.backward()
        adam.step()
    print(f"loss {loss.item():.3f}", flush=True)


@torch.no_grad()
def reference(mtp: MtpModel, target: PreTrainedModel, tokens: list[int]) -> tuple[dict[str, np.ndarray], float]:
    """Return log-probabilities, and the smallest margin of the router over all rows."""
    margins: list[float] = []
    hooks = [
        router.register_forward_hook(lambda m, _, out: margins.append(margin(m, out[0]).min().item()))
        for router in routers_of(mtp)
    ]
    states = target.model(torch.tensor([tokens]), use_cache=False).last_hidden_state
    inputs, text, chained = states[:, :-1], list(tokens), []
    for draft in range(NUM_DRAFTS):
        found = outputs(mtp, torch.tensor([text[1:]]), inputs)
        logprobs = mtp.shared_head(found).log_softmax(-1)[0]
        if draft == 0:
            first = logprobs
        else:
            chained.append(logprobs[-1])
        text.append(int(logprobs[-1].argmax()))
        inputs = torch.cat([inputs, found[:, -1:]], dim=1)
    for hook in hooks:
        hook.remove()
    rows = [position for position in POSITIONS if position < len(first)]
    values: dict[str, Any] = {
        "tokens": np.array(tokens, np.int32),
        "positions": np.array(rows, np.int32),
        "logprobs": first[rows].numpy().astype(np.float32),
        "drafts": np.array(text[len(tokens) :], np.int32),
        "chained_logprobs": torch.stack(chained).numpy().astype(np.float32),
    }
    return values, min(margins)


@torch.no_grad()
def greedy_text(target: PreTrainedModel, generator: torch.Generator) -> list[int]:
    """Return a random prompt and its greedy continuation, whose choices are decisive."""
    while True:
        tokens = torch.randint(0, target.config.vocab_size, (PROMPT_LEN,), generator=generator).tolist()
        while len(tokens) < TEXT_LEN:
            logits, margins = run(target, tokens)
            best = logits[-1].topk(2).values
            if min(margins.min(), best[0] - best[1]) < MIN_MARGIN:
                break
            tokens.append(int(logits[-1].argmax()))
        else:
            return tokens


@torch.no_grad()
def drafts_of(mtp: MtpModel, target: PreTrainedModel, text: list[int]) -> list[list[int]]:
    """Return the drafts after text[:end] for each end from the first token of the output on."""
    states = target.model(torch.tensor([text]), use_cache=False).last_hidden_state
    found = []
    for end in range(PROMPT_LEN + 1, len(text)):
        inputs, tokens = states[:, : end - 1], text[:end]
        for _ in range(NUM_DRAFTS):
            state = outputs(mtp, torch.tensor([tokens[1:]]), inputs)[:, -1:]
            tokens.append(int(mtp.shared_head(state).argmax()))
            inputs = torch.cat([inputs, state], dim=1)
        found.append(tokens[end:])
    return found


def round_weights(mtp: MtpModel) -> None:
    """Round the layer's weights, but for its router, to bfloat16 values, as they are stored."""
    for name, weight in mtp.layers.named_parameters():
        if not is_router(name):
            weight.data.copy_(weight.data.to(torch.bfloat16))


def stored_tensors(mtp: MtpModel, target: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the layer's tensors by their names in files of DeepSeek-V3 and GLM-4.5."""
    found = {"shared_head.head.weight": target.lm_head.weight, "embed_tokens.weight": target.model.embed_tokens.weight}
    for name, weight in (*mtp.layers.named_parameters(), *mtp.layers.named_buffers()):
        found[name.removeprefix("0.").removeprefix("mtp_block.").replace("post_norm.", "shared_head.norm.")] = weight
    for fused, projections in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
        for expert, whole in enumerate(found.pop(f"mlp.experts.{fused}")):
            for projection, part in zip(projections, whole.chunk(len(projections))):
                found[f"mlp.experts.{expert}.{projection}.weight"] = part
    prefix = f"model.layers.{target.config.num_hidden_layers}."
    return {f"{prefix}{name}": stored(f".{name}", weight.detach()).contiguous() for name, weight in found.items()}


def stored(name: str, weight: torch.Tensor) -> torch.Tensor:
    """Return a weight in bfloat16; a router stays in float32 unless bfloat16 has its values."""
    return weight.to(torch.bfloat16) if not is_router(name) else smallest(weight) if weight.ndim == 2 else weight


def write_layer(target: PreTrainedModel, target_name: str, name: str, training: Training) -> None:
    """Write a trained layer, and its values for the golden text of its target."""
    tokens = np.load(GOLDEN / target_name / "reference.npz")["tokens"].tolist()
    generator = torch.Generator().manual_seed(sum(name.encode()))
    texts, smallest_margin = [greedy_text(target, generator) for _ in range(NUM_REPLAYED)], 0.0
    while smallest_margin < MARGIN["sigmoid"] / 5:
        mtp = make_layer(target, generator)
        training.prepare(mtp)
        train(mtp, target, texts[:NUM_LEARNT], generator, training)
        round_weights(mtp)
        values, smallest_margin = reference(mtp, target, tokens)
        print(f"margin {smallest_margin:.4f}", flush=True)
    values["texts"] = np.array(texts, np.int32)
    values["drafts_of_texts"] = np.array([drafts_of(mtp, target, text) for text in texts], np.int32)
    folder = GOLDEN / name
    folder.mkdir(exist_ok=True)
    save_file(stored_tensors(mtp, target), folder / "model.safetensors", metadata={"format": "pt"})
    np.savez_compressed(folder / "reference.npz", **values)


def main() -> None:
    target = Glm4MoeForCausalLM.from_pretrained(
        GOLDEN / TARGET, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    write_layer(target, TARGET, NAME, Training())


if __name__ == "__main__":
    main()
