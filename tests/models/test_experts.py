# SPDX-License-Identifier: Apache-2.0
"""Models with experts: what the golden checkpoints depend on, how experts are loaded, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest
from safetensors.paddle import load_file, save_file

from fastdeploy.config.experts_config import RouterRule
from fastdeploy.config.model_config import ModelConfig
from fastdeploy.core.errors import ConfigError
from fastdeploy.layers.experts import SparseMLP
from fastdeploy.models.decoder import CausalLM
from fastdeploy.models.loader import load_model
from fastdeploy.models.weight_source import SafetensorsSource
from fastdeploy.ops.experts import RoutedRows, Router, route
from tests.models.model_driver import GOLDEN, MAX_MODEL_LEN, Driver, Logits, load_golden, log_softmax
from tests.models.reference_backend import reference_backend
from tests.models.test_parity import reference

GOLDENS = ["ernie4_5_moe", "glm4_moe", "glm4_moe_air", "qwen3_moe", "qwen3_moe_plain_weights"]
Change = Callable[[SparseMLP], None]


def sparse_mlps(model: CausalLM) -> list[SparseMLP]:
    return [layer.mlp for layer in model._layers if isinstance(layer.mlp, SparseMLP)]


def logprobs(model: CausalLM, name: str) -> Logits:
    expected = reference(name)
    return log_softmax(Driver(model).run_alone(expected["tokens"]))[expected["positions"]]


def with_rule(**values: object) -> Change:
    def change(mlp: SparseMLP) -> None:
        mlp.router = replace(mlp.router, rule=replace(mlp.router.rule, **values))  # type: ignore[arg-type]

    return change


def without_bias(mlp: SparseMLP) -> None:
    mlp.router = replace(mlp.router, correction_bias=None)


def with_equal_scores(mlp: SparseMLP) -> None:
    mlp.router = replace(mlp.router, gate=paddle.zeros_like(mlp.router.gate))


def without_shared_expert(mlp: SparseMLP) -> None:
    mlp.shared = None


ABLATIONS: list[tuple[str, str, Change]] = [
    *((name, "gate", with_equal_scores) for name in GOLDENS),
    *((name, "correction bias", without_bias) for name in ("ernie4_5_moe", "glm4_moe", "glm4_moe_air")),
    *((name, "shared expert", without_shared_expert) for name in ("ernie4_5_moe", "glm4_moe", "glm4_moe_air")),
    ("glm4_moe", "groups", with_rule(num_groups=1, num_kept_groups=1)),
    ("glm4_moe", "score of a group", with_rule(group_score="largest")),
    ("glm4_moe", "scale", with_rule(scale=1.0)),
    ("glm4_moe", "normalisation", with_rule(normalisation="none")),
    ("ernie4_5_moe", "normalisation", with_rule(normalisation="none")),
    ("qwen3_moe", "normalisation", with_rule(normalisation="none")),
    ("qwen3_moe_plain_weights", "normalisation", with_rule(normalisation="add")),
    ("ernie4_5_moe", "scoring", with_rule(scoring="sigmoid")),
    ("glm4_moe_air", "scoring", with_rule(scoring="softmax")),
]


@pytest.mark.parametrize(("name", "what", "change"), ABLATIONS, ids=lambda value: str(value)[:24])
def test_every_part_of_the_router_and_the_shared_expert_moves_the_logprobs_of_the_goldens(
    name: str, what: str, change: Change
) -> None:
    model = load_golden(name)
    for mlp in sparse_mlps(model):
        change(mlp)
    assert np.abs(logprobs(model, name) - reference(name)["logprobs_float32"]).max() > 1e-2, what


@pytest.mark.parametrize("name", GOLDENS)
def test_the_goldens_have_dense_and_sparse_layers_and_each_layer_chooses_many_experts(name: str) -> None:
    model = load_golden(name)
    config = model.config.experts
    assert config is not None and 0 < len(sparse_mlps(model)) == sum(config.sparse_layers) < model.num_layers
    logprobs(model, name)
    assert all(mlp.router.load.tolist()[0] == config.num_experts for mlp in sparse_mlps(model))


def gap(scores: np.ndarray, count: int) -> np.ndarray:
    """Return by how much the last of the `count` largest scores of each row exceeds the next one."""
    ordered = np.sort(scores, axis=-1)
    return ordered[:, -count] - ordered[:, -count - 1]


def margins(scores: np.ndarray, rule: RouterRule) -> np.ndarray:
    """Return the gap of each row's experts or, if it is smaller, of its groups."""
    if rule.num_groups == 1:
        return gap(scores, rule.num_chosen)
    groups = scores.reshape(len(scores), rule.num_groups, -1)
    of_groups = np.sort(groups, axis=-1)[..., -2:].sum(axis=-1)
    is_kept = of_groups >= np.sort(of_groups, axis=-1)[:, -rule.num_kept_groups, None]
    choice = np.where(is_kept[..., None], groups, -np.inf).reshape(scores.shape)
    return np.minimum(gap(of_groups, rule.num_kept_groups), gap(choice, rule.num_chosen))


@pytest.mark.parametrize("name", GOLDENS)
def test_no_row_of_a_golden_is_near_a_tie(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[float] = []

    def record(hidden: paddle.Tensor, router: Router, routed: RoutedRows, num_rows: int) -> None:
        route(hidden, router, routed, num_rows)
        logits = paddle.matmul(routed.normed[:num_rows], router.gate.astype("float32"), transpose_y=True)
        scores = F.sigmoid(logits) if router.rule.scoring == "sigmoid" else F.softmax(logits)
        bias = 0.0 if router.correction_bias is None else router.correction_bias
        found.extend(margins((scores + bias).numpy(), router.rule).tolist())

    monkeypatch.setattr("fastdeploy.layers.experts.route", record)
    with reference_backend():
        Driver(load_golden(name), captures=False).run_alone(reference(name)["tokens"])
    assert len(found) > 50 and min(found) > 1e-3


@pytest.mark.parametrize("name", ["glm4_moe", "glm4_moe_air"])
def test_goldens_with_partial_rotary_fail_with_the_whole_head_rotated(name: str) -> None:
    config = load_golden(name).config
    model = load_golden(name, rope=replace(config.rope, rotary_dim=config.head_dim))
    assert np.abs(logprobs(model, name) - reference(name)["logprobs_float32"]).max() > 1e-2


def test_both_layouts_of_ernie_give_the_same_bits() -> None:
    tokens = reference("ernie4_5_moe")["tokens"]
    found = [Driver(load_golden(name)).run_alone(tokens) for name in ("ernie4_5_moe", "ernie4_5_moe_paddle")]
    np.testing.assert_array_equal(*(logits.view(np.uint32) for logits in found))


def test_a_router_keeps_the_dtype_in_which_it_is_stored() -> None:
    gates = {name: sparse_mlps(load_golden(name, "bfloat16"))[0].router.gate.dtype for name in GOLDENS[:4]}
    assert gates.pop("qwen3_moe") == paddle.bfloat16
    assert set(gates.values()) == {paddle.float32}


@pytest.mark.parametrize("quantization", ["wint8", "wint4", "w8a8", "w4a8"])
@pytest.mark.parametrize("name", ["ernie4_5_moe", "glm4_moe", "qwen3_moe"])
def test_quantized_experts_are_close_to_the_reference_and_rows_are_independent(name: str, quantization: str) -> None:
    driver, tokens = Driver(load_golden(name, "bfloat16", quantization)), reference(name)["tokens"]
    whole = driver.run_alone(tokens)
    np.testing.assert_array_equal(driver.run_alone(tokens, [17, 1, 1, 33]).view(np.uint32), whole.view(np.uint32))
    expected = reference(name)["logprobs_float32"]
    error = np.abs(log_softmax(whole)[reference(name)["positions"]] - expected).mean()
    assert error < {"wint8": 0.05, "w8a8": 0.05}.get(quantization, 0.3)


@pytest.mark.parametrize("quantization", ["none", "wint4", "w8a8"])
@pytest.mark.parametrize("name", ["ernie4_5_moe", "glm4_moe", "qwen3_moe"])
def test_what_earlier_steps_left_in_the_buffers_does_not_count(name: str, quantization: str) -> None:
    model, tokens = load_golden(name, "bfloat16", quantization), reference(name)["tokens"]
    whole = Driver(model).run_alone(tokens)
    driver, found = Driver(model), []
    request = driver.start()
    for begin, end in ((0, 20), (20, 21), (21, 38), (38, 52)):
        for buffer in (*model._buffers._scratch.values(), *vars(sparse_mlps(model)[0].routed).values()):
            buffer.fill_(float("inf") if buffer.is_floating_point() else -(2**30))
        driver.step([(request, tokens[begin:end])])
        found.append(request.logits[-1])
    np.testing.assert_array_equal(np.concatenate(found).view(np.uint32), whole.view(np.uint32))


def copy_of(name: str, folder: Path, change: Callable[[dict[str, paddle.Tensor]], None], **config: object) -> Path:
    """Write a golden checkpoint with other tensors."""
    shutil.copytree(GOLDEN / name, folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "np" if name.endswith("paddle") else "pt"})
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | config))
    return folder


def refusal(folder: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load_model(ModelConfig.from_pretrained(folder), max_rows=64, max_model_len=MAX_MODEL_LEN)
    assert "\n" not in str(caught.value)
    return str(caught.value)


BIAS = "layers.1.mlp.moe_statics.e_score_correction_bias"


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("ernie4_5_moe", f"model.{BIAS}"),
        ("ernie4_5_moe_paddle", f"ernie.{BIAS}"),
        ("glm4_moe", "model.layers.2.mlp.gate.e_score_correction_bias"),
        ("qwen3_moe", "model.layers.1.mlp.gate.weight"),
        ("qwen3_moe", "model.layers.1.mlp.experts.7.down_proj.weight"),
        ("ernie4_5_moe", "model.layers.2.mlp.shared_experts.up_proj.weight"),
    ],
)
def test_a_missing_tensor_of_a_sparse_layer_is_named(name: str, missing: str, tmp_path: Path) -> None:
    folder = copy_of(name, tmp_path / "model", lambda tensors: tensors.pop(missing))  # type: ignore[arg-type,return-value]
    assert f"1 missing ({missing})" in refusal(folder)


def test_tensors_of_other_experts_and_of_wrong_sizes_are_named(tmp_path: Path) -> None:
    def add_expert(tensors: dict[str, paddle.Tensor]) -> None:
        tensors["model.layers.1.mlp.experts.8.down_proj.weight"] = paddle.zeros([32, 24], "bfloat16")
        tensors["model.layers.2.mlp.gate.weight"] = paddle.zeros([9, 32], "bfloat16")

    message = refusal(copy_of("qwen3_moe", tmp_path / "model", add_expert))
    assert "1 unexpected (model.layers.1.mlp.experts.8.down_proj.weight)" in message
    assert "model.layers.2.mlp.gate.weight is [9, 32], expected [8, 32]" in message


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("qwen3_moe", "model.layers.2.mlp.experts.5.up_proj.weight"),
        ("ernie4_5_moe_paddle", "ernie.layers.1.mlp.experts.7.up_gate_proj.weight"),
        ("glm4_moe", "model.layers.1.mlp.gate.e_score_correction_bias"),
    ],
)
def test_a_value_that_is_not_finite_is_refused_by_the_name_of_its_tensor(name: str, wrong: str, tmp_path: Path) -> None:
    def spoil(tensors: dict[str, paddle.Tensor]) -> None:
        values = tensors[wrong].astype("float32").numpy()
        values.flat[-1] = np.inf
        tensors[wrong] = paddle.to_tensor(values).astype(tensors[wrong].dtype)

    message = refusal(copy_of(name, tmp_path / "model", spoil))
    assert f"tensor {wrong} has values that are not finite" in message


def test_a_shared_expert_that_the_configuration_does_not_have_is_unexpected(tmp_path: Path) -> None:
    folder = copy_of("ernie4_5_moe", tmp_path / "model", lambda tensors: None, moe_num_shared_experts=0)
    assert "6 unexpected (model.layers.1.mlp.shared_experts.down_proj.weight" in refusal(folder)


def test_fused_weights_are_compared_with_their_sizes_in_the_files(tmp_path: Path) -> None:
    fused = "ernie.layers.1.mlp.experts.3.up_gate_proj.weight"

    def shorten(tensors: dict[str, paddle.Tensor]) -> None:
        tensors[fused] = tensors[fused][:, :46].contiguous()

    message = refusal(copy_of("ernie4_5_moe_paddle", tmp_path / "model", shorten))
    assert f"{fused} is [32, 46], expected [32, 48]" in message


def test_progress_ends_at_one_and_counts_every_expert() -> None:
    done: list[float] = []
    config = ModelConfig.from_pretrained(GOLDEN / "glm4_moe")
    load_model(config, max_rows=8, max_model_len=8, on_progress=lambda _, fraction: done.append(fraction))
    assert done == sorted(done) and done[-1] == pytest.approx(1.0) and len(done) > 2 * 8 * 2


def test_a_step_of_one_row_streams_only_the_experts_that_it_chooses() -> None:
    model = load_golden("glm4_moe_air")  # 3 of 8 experts
    mlps = sparse_mlps(model)
    routed = sum(mlp.gate_up.num_bytes + mlp.down.num_bytes for mlp in mlps)
    embedding = model.config.vocab_size * model.config.hidden_size * 4
    assert model.num_weight_bytes - embedding - model.num_streamed_bytes == routed * 5 // 8


def test_rows_of_a_dummy_model_spread_over_the_experts() -> None:
    config = ModelConfig.from_pretrained(GOLDEN / "glm4_moe")
    assert config.experts is not None
    experts = replace(config.experts, num_experts=64, rule=replace(config.experts.rule, num_groups=1))
    config = replace(config, experts=experts, hidden_size=128)
    model = load_model(config, max_rows=256, max_model_len=MAX_MODEL_LEN, load_choices="dummy")
    tokens = np.random.default_rng(0).integers(0, 112, 60)
    Driver(model).run_alone([int(token) for token in tokens])
    loads = [mlp.router.load.tolist() for mlp in sparse_mlps(model)]
    assert all(distinct > 32 and largest < 16 for distinct, largest in loads)  # 120 choices of 64 experts


def test_the_pages_of_a_tensor_are_given_back_and_it_is_not_read_again(tmp_path: Path) -> None:
    save_file({"a": paddle.ones([1024, 1024])}, tmp_path / "model.safetensors", {"format": "pt"})
    source = SafetensorsSource(tmp_path)
    tensor = source.read("a")

    def resident_kib() -> int:
        begin = tensor.data_ptr()
        maps = Path("/proc/self/smaps").read_text().splitlines()
        for number, line in enumerate(maps):
            span = line.split()[0].split("-")
            if len(span) == 2 and int(span[0], 16) <= begin < int(span[1], 16):
                return int(next(row for row in maps[number:] if row.startswith("Rss:")).split()[1])
        raise AssertionError("the tensor is not in mapped memory")

    assert resident_kib() >= 4096
    source.release("a")
    assert resident_kib() <= 16
    with pytest.raises(ConfigError):
        source.read("a")
