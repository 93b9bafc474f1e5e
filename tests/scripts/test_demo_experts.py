# SPDX-License-Identifier: Apache-2.0
"""The training of the demonstration model with experts; these tests need torch, which the package does not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="only the training of the demonstration model needs it")
pytestmark = pytest.mark.usefixtures("scripts_on_path")


@pytest.fixture
def shape() -> Any:
    from demo_model.model import MOE_SHAPE

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_layers": 3, "head_dim": 16}
    return replace(MOE_SHAPE, **sizes, num_experts=6, expert_width=16, max_positions=64)


def drawn_decoder(shape: Any) -> Any:
    """Return a decoder in which every matrix, the routers and their biases matter."""
    from demo_model.model import Decoder

    torch.manual_seed(0)
    decoder = Decoder(shape)
    with torch.no_grad():
        for name, param in decoder.named_parameters():
            if param.ndim > 1:
                param.normal_(std=1.2 if name.endswith(".gate") else 0.3)
            if name.endswith("correction_bias"):
                param.uniform_(-0.2, 0.2)
    return decoder


def defined_output(block: Any, x: Any) -> Any:
    """Return what a sparse block computes, from every expert's output for every token."""
    from torch.nn import functional as F

    scores = F.linear(x, block.gate).softmax(-1)
    ids = (scores + block.correction_bias.detach()).topk(block.num_chosen).indices
    chosen = scores.gather(2, ids)
    weights = torch.zeros_like(scores).scatter(2, ids, chosen / chosen.sum(-1, keepdim=True))
    gate, up = (torch.einsum("btd,xwd->btxw", x, stack) for stack in (block.gate_proj, block.up_proj))
    outputs = torch.einsum("btxw,xdw->btxd", F.silu(gate) * up, block.down_proj)
    return (outputs * weights[..., None]).sum(2) + block.shared_experts(x)


def test_a_sparse_block_and_its_gradients_are_those_of_the_definition(shape: Any) -> None:
    block = drawn_decoder(shape).layers[1].mlp
    x, weights = torch.randn(2, 9, shape.hidden_size, requires_grad=True), torch.randn(2, 9, shape.hidden_size)
    names = [name for name, _ in block.named_parameters() if name != "correction_bias"]
    inputs = (x, *(block.get_parameter(name) for name in names))
    outputs = block(x), defined_output(block, x)
    torch.testing.assert_close(*outputs)
    found, expected = (torch.autograd.grad((out * weights).sum(), inputs) for out in outputs)
    for name, one, other in zip(["x", *names], found, expected):
        torch.testing.assert_close(one, other, msg=f"gradient of {name}")
        assert other.abs().max() > 0


def test_the_bias_of_an_expert_steps_against_its_load(shape: Any) -> None:
    from demo_model.optim import BIAS_STEP, SignStep

    block = drawn_decoder(shape).layers[1].mlp
    x, before = torch.randn(4, 8, shape.hidden_size), block.correction_bias.detach().clone()
    load = torch.bincount(block.route(x.flatten(0, 1))[0].flatten(), minlength=shape.num_experts).float()
    assert load.max() > load.min()
    block(x).sum().backward()
    SignStep([block.correction_bias], BIAS_STEP).step()
    torch.testing.assert_close(block.correction_bias.detach(), before - BIAS_STEP * (load - load.mean()).sign())


def test_steps_of_the_bias_even_out_the_load(shape: Any) -> None:
    from demo_model.optim import BIAS_STEP, SignStep

    block, x = drawn_decoder(shape).layers[1].mlp, torch.randn(64, shape.hidden_size)
    steps, spread = SignStep([block.correction_bias], 10 * BIAS_STEP), []
    for _ in range(60):
        load = torch.bincount(block.route(x)[0].flatten(), minlength=shape.num_experts).float()
        block.correction_bias.grad = load - load.mean()
        spread.append(float(load.max() - load.min()))
        steps.step()
    assert max(spread[-8:]) < 0.7 * spread[0]


def test_only_correction_biases_move_at_the_end(shape: Any) -> None:
    from demo_model.optim import Optimizers
    from demo_model.trunk import MOE_SCHEDULE

    decoder, rate = drawn_decoder(shape), MOE_SCHEDULE.relative_lr(step=810, spent=810 / 840)
    before = {name: value.clone() for name, value in decoder.state_dict().items()}
    decoder.logits(decoder.hidden(torch.arange(8, 32)[None])).square().mean().backward()
    Optimizers(decoder, 0.02, 0.003).step(rate)
    moved = {name for name, value in decoder.state_dict().items() if not torch.equal(value, before[name])}
    assert moved == {f"layers.{layer}.mlp.correction_bias" for layer in (1, 2)}
    assert MOE_SCHEDULE.relative_lr(step=790, spent=790 / 840) > 0


def test_a_stack_of_experts_is_updated_matrix_by_matrix() -> None:
    from demo_model.optim import Muon

    torch.manual_seed(0)
    start, grad = torch.randn(3, 4, 6), torch.randn(3, 4, 6)
    stack, matrices = torch.nn.Parameter(start.clone()), [torch.nn.Parameter(one.clone()) for one in start]
    for params, grads in (([stack], [grad]), (matrices, list(grad))):
        for param, own in zip(params, grads):
            param.grad = own.clone()
        Muon(params, lr=0.1, num_threads=1).step()
    torch.testing.assert_close(stack.detach(), torch.stack([one.detach() for one in matrices]))
    assert not torch.equal(stack.detach(), start)


def written_model(folder: Path, shape: Any) -> Any:
    """Write a checkpoint of a drawn decoder with an MTP layer; return both."""
    from demo_model.export import write_checkpoint
    from demo_model.model import MTPLayer

    decoder, mtp = drawn_decoder(shape), MTPLayer(shape)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text("{}")
    write_checkpoint(folder / "model", folder, decoder, mtp)
    return decoder, mtp


def test_a_checkpoint_holds_one_tensor_per_expert_and_reads_back(tmp_path: Path, shape: Any) -> None:
    from demo_model.export import read_checkpoint
    from safetensors import safe_open

    decoder, mtp = written_model(tmp_path, shape)
    with safe_open(tmp_path / "model" / "model.safetensors", "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    expert = tensors["model.layers.2.mlp.experts.5.down_proj.weight"]
    torch.testing.assert_close(expert, decoder.layers[2].mlp.down_proj[5].bfloat16())
    routers = {name: value.dtype for name, value in tensors.items() if "gate.weight" in name or "statics" in name}
    assert set(routers.values()) == {torch.float32} and len(routers) == 4
    assert tensors["model.layers.1.mlp.moe_statics.e_score_correction_bias"].shape == (1, shape.num_experts)
    for module, read in zip((decoder, mtp), read_checkpoint(tmp_path / "model")):
        rounded = {name: value.bfloat16() for name, value in module.state_dict().items()}
        torch.testing.assert_close({k: v.bfloat16() for k, v in read.state_dict().items()}, rounded)


def test_a_checkpoint_has_the_logits_of_transformers(tmp_path: Path, shape: Any) -> None:
    pytest.importorskip("transformers")
    from demo_model.export import compare_with_transformers

    written_model(tmp_path, shape)
    assert compare_with_transformers(tmp_path / "model", num_tokens=40)["float32"] < 1e-4


@pytest.fixture
def work_dir(tmp_path: Path) -> Path:
    """A work folder whose corpus has two documents."""
    random = np.random.default_rng(0)
    for name in ("train", "held_out"):
        np.savez(tmp_path / f"{name}.npz", tokens=random.integers(8, 64, 900, dtype=np.uint16), offsets=[0, 400, 900])
    return tmp_path


class Killed(Exception):
    """Ends a session in the middle."""


def trained(work_dir: Path, shape: Any, kill_at: tuple[int, ...]) -> dict[str, Any]:
    """Train 12 steps in as many sessions as it takes if a session ends at each given step; return the parameters."""
    from demo_model.data import PackedTokens
    from demo_model.optim import TimeSchedule
    from demo_model.trunk import Budget, LanguageModelTask, LoopConfig, Stage, TrainingLoop

    def kill(loop: TrainingLoop, step: int) -> None:
        own = loop._step

        def stepped(*arguments: Any) -> None:
            if loop.progress.step == step:
                raise Killed
            own(*arguments)

        loop._step = stepped

    stages, name = (Stage(0.5, 16, 8, 4), Stage(1.0, 32, 4, 4)), f"run{len(kill_at)}"
    config = LoopConfig(name, work_dir, Budget(steps=12), stages, 0.02, 3e-3, TimeSchedule(2), num_workers=1)
    for step in (*kill_at, None):
        loop = TrainingLoop(config, LanguageModelTask(drawn_decoder(shape)), PackedTokens(work_dir / "train.npz", 1))
        if step is None:
            loop.run()
            break
        kill(loop, step)
        with pytest.raises(Killed):
            loop.run()
    return {name: value.clone() for name, value in loop.task.state_dict().items()}


def test_a_resumed_training_equals_one_session(work_dir: Path, shape: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import demo_model.trunk

    monkeypatch.setattr(demo_model.trunk, "SAVE_INTERVAL_S", -1.0)
    expected = trained(work_dir, shape, ())
    torch.testing.assert_close(trained(work_dir, shape, (4, 9)), expected, rtol=0, atol=0)
    start = drawn_decoder(shape).state_dict()
    assert not torch.equal(expected["decoder.layers.1.mlp.gate"], start["layers.1.mlp.gate"])
