# SPDX-License-Identifier: Apache-2.0
"""The training of draft heads for the demonstration model; these tests need torch, which the package does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.spec_decode.heads_definition import HEADS, TargetView

METHODS = {"eagle": "eagle", "eagle3": "eagle3", "mlp": "mlp_speculator", "medusa": "medusa"}
torch = pytest.importorskip("torch", reason="only the training of the demonstration model needs it")
pytestmark = pytest.mark.usefixtures("scripts_on_path")


@pytest.fixture
def decoder() -> Any:
    """Return a small target in which every matrix matters, with as many layers as the demonstration model."""
    from demo_model.model import Decoder, ModelShape

    torch.manual_seed(0)
    return drawn(Decoder(ModelShape(hidden_size=32, intermediate_size=48, head_dim=16, max_positions=64)))


def drawn(module: Any) -> Any:
    """Return the module with random parameters, in values that bfloat16 has."""
    for param in module.parameters():
        scale = param.shape[-1] ** -0.5 if param.ndim > 1 else 0.3
        param.data = (torch.randn_like(param) * scale + (0.0 if param.ndim > 1 else 1.0)).bfloat16().float()
    return module.requires_grad_(False)


def drawn_head(name: str, decoder: Any) -> Any:
    from demo_model.heads_training import make_head

    torch.manual_seed(1)
    head = drawn(make_head(name, decoder.shape))
    if name == "eagle3":
        ids = np.sort(np.random.default_rng(0).permutation(decoder.shape.vocab_size)[: len(head.draft_ids)])
        head.draft_ids.copy_(torch.from_numpy(ids))
    return head


def view_of(decoder: Any, tokens: list[int]) -> TargetView:
    from demo_model.head_rows import tapped_states

    layers = tuple(range(len(decoder.layers)))
    with torch.inference_mode():
        states = tapped_states(decoder, torch.tensor([tokens]), layers, torch.float32)[0].numpy()
    residuals = states[:, 1:].transpose(1, 0, 2)
    embedding = decoder.embed_tokens.weight.numpy()
    return TargetView(states[:, 0], np.concatenate([residuals, residuals[-1:]]), embedding, embedding)


@pytest.mark.parametrize("name", METHODS)
def test_a_written_head_drafts_what_the_trained_module_drafts(name: str, decoder: Any, tmp_path: Path) -> None:
    from demo_model.head_rows import TAPS
    from demo_model.heads_evaluate import head_drafts, step_logits
    from demo_model.heads_export import write_head
    from demo_model.mtp import NUM_STEPS

    head = drawn_head(name, decoder)
    write_head(name, head, decoder.shape, tmp_path)
    text = np.random.default_rng(3).integers(8, decoder.shape.vocab_size, 17).tolist()
    drafts = HEADS[METHODS[name]](tmp_path, "float64").drafts(text, view_of(decoder, text), NUM_STEPS)

    row = [*text, *drafts.ids, 0]
    of_module = head_drafts(head, decoder, row)
    assert [of_module[step, len(text) - 1 + step] for step in range(NUM_STEPS)] == drafts.ids
    for step, logits in enumerate(step_logits(head, decoder, torch.tensor([row]), TAPS)):
        expected = drafts.log_probs[step][np.isfinite(drafts.log_probs[step])]
        np.testing.assert_allclose(logits[len(text) - 2].log_softmax(-1).numpy(), expected, atol=2e-4)


@pytest.mark.parametrize("name", METHODS)
def test_training_lowers_the_loss_of_every_head(name: str, decoder: Any) -> None:
    from demo_model.head_rows import TAPS, tapped_states
    from demo_model.heads_training import LOSSES
    from demo_model.optim import Optimizers

    head = drawn_head(name, decoder).requires_grad_(True)
    tokens = torch.from_numpy(np.random.default_rng(4).integers(8, decoder.shape.vocab_size, (2, 24)))
    with torch.no_grad():
        states = tapped_states(decoder, tokens, TAPS, torch.float32)
    optimizers, losses = Optimizers(head, 0.02, 3e-3), []
    for _ in range(6):
        loss = LOSSES[name](head, decoder, tokens, states[:, :, 0], states[:, :, 1:].flatten(2))
        head.zero_grad()
        loss.backward()
        optimizers.step(1.0)
        losses.append(loss.item())
    assert losses[-1] < 0.99 * losses[0]
    assert all(param.grad is not None and param.grad.any() for param in head.parameters())


def test_stored_rows_are_the_states_of_the_target_and_begin_with_its_continuations(
    decoder: Any, tmp_path: Path
) -> None:
    from demo_model.data import save_documents
    from demo_model.generate import greedy_continuations
    from demo_model.head_rows import TAPS, stored_head_rows, tapped_states
    from demo_model.mtp import DistillationPlan, in_bfloat16

    documents = [np.random.default_rng(i).integers(8, 4096, 90).astype(np.uint16) for i in range(4)]
    save_documents(documents, tmp_path / "train.npz")
    plan = DistillationPlan(num_generated=3, num_real=2, prompt_length=5, row_length=16, batch=2)
    rows = stored_head_rows(decoder, tmp_path, plan)
    lean = in_bfloat16(decoder)
    prompts = torch.from_numpy(rows.tokens[:3, :5])
    expected = greedy_continuations(lean, prompts[:2], 11, torch.bfloat16)
    assert rows.tokens[:2, 5:].tolist() == expected.tolist()
    assert rows.continuations().shape == (3 * 11,)

    tokens, normed, taps = stored_head_rows(decoder, tmp_path, plan).pick(torch.tensor([[4], [1]]))
    assert tokens.tolist() == rows.tokens[[4, 1]].tolist()
    with torch.inference_mode():
        states = tapped_states(lean, tokens, TAPS, torch.bfloat16)
    np.testing.assert_allclose(normed.float().numpy(), states[:, :, 0].float().numpy(), atol=0.05)
    np.testing.assert_allclose(taps.float().numpy(), states[:, :, 1:].flatten(2).float().numpy(), atol=0.05)
    with pytest.raises(ValueError, match="another plan"):
        stored_head_rows(decoder, tmp_path, DistillationPlan(num_generated=2, num_real=2, row_length=16))


def test_the_draft_vocabulary_is_the_most_frequent_tokens_as_offsets() -> None:
    from demo_model.heads_export import vocabulary_maps
    from demo_model.heads_training import frequent_ids

    ids = frequent_ids(np.array([5, 5, 5, 2, 2, 7, 3]), vocab_size=8, num_ids=3)
    assert ids.tolist() == [2, 3, 5]
    maps = vocabulary_maps(torch.from_numpy(ids), vocab_size=8)
    assert maps["d2t"].tolist() == [2, 2, 3]
    assert maps["t2d"].nonzero().flatten().tolist() == [2, 3, 5]


def test_shipped_configurations_name_their_sizes() -> None:
    from demo_model.heads_export import head_config
    from demo_model.model import ModelShape

    config = head_config("eagle3", ModelShape())
    assert (config["draft_vocab_size"], config["eagle_aux_hidden_state_layer_ids"]) == (2048, [2, 7, 11])
    assert json.loads(json.dumps(config)) == config
