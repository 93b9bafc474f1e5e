# SPDX-License-Identifier: Apache-2.0
"""Bounds per operator: loops that read and multiply everything, and work that adds up to that of the step."""

from __future__ import annotations

from dataclasses import replace

import paddle
import pytest

from benchmarks.launches import FORMS, LaunchFloors, LaunchWork, LoopForm, Replay, capture_replays, total_work
from benchmarks.shape_engine import ShapeEngine, StepShape
from fastdeploy.ops.backends.cpu import library
from fastdeploy.ops.backends.cpu.graph import OpGraph
from fastdeploy.ops.examples import random_rows
from fastdeploy.ops.head_products import pack_heads, project_heads
from fastdeploy.ops.linear import WeightPiece, linear, pack_linear
from tests.ops.isa_paths import PATHS, run, supported

ROWS = 40  # more than any path multiplies at a time


# Lines of 64 bytes of 80 outputs (five panels of sixteen) and 256 inputs: four bytes, two, one and a half per weight.
@pytest.mark.parametrize(
    ("dtype", "kind", "lines"),
    [
        ("float32", "none", 1280),
        ("bfloat16", "none", 640),
        ("bfloat16", "wint8", 320),
        ("bfloat16", "w8a8", 320),
        ("bfloat16", "wint4", 160),
        ("bfloat16", "w4a8", 160),
    ],
)
@pytest.mark.parametrize("is_gated", [False, True])
def test_a_loop_multiplies_every_line_of_a_weight_by_every_row(
    dtype: str, kind: str, lines: int, is_gated: bool
) -> None:
    halves = 2 if is_gated else 1
    weight = pack_linear(random_rows(80 * halves, 256, dtype, 1), None, kind, is_gated)
    x, out = random_rows(ROWS, 256, dtype, 2), paddle.full([ROWS, 80], 7.0, dtype)
    graph = OpGraph(lambda: linear(x, weight, out, ROWS))
    for form in FORMS:
        for num_rows in (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 17, 18, ROWS):
            _, found = Replay(graph, num_rows, 0).time_loops([form], on_thread_time=True)
            assert found == [halves * lines * num_rows], (num_rows, values_of(form))
    assert (out == 7.0).all(), "a loop must not write"


# Lines of 64 bytes of three matrices of 80 outputs and 256 inputs.
@pytest.mark.parametrize(
    ("dtype", "kind", "lines"), [("float32", "none", 3840), ("bfloat16", "none", 1920), ("bfloat16", "w4a8", 480)]
)
def test_the_loops_and_the_work_of_heads_are_those_of_all_their_matrices(dtype: str, kind: str, lines: int) -> None:
    weights = [[WeightPiece(random_rows(80, 256, dtype, head), 0, 80)] for head in range(3)]
    packed = pack_heads(weights, kind)
    x, out = random_rows(ROWS, 3 * 256, dtype, 2), paddle.full([ROWS, 3 * 80], 7.0, dtype)
    graph = OpGraph(lambda: project_heads(x, packed, out, ROWS))
    for num_rows in (1, 8, ROWS):
        replay = Replay(graph, num_rows, 0)
        _, found = replay.time_loops([FORMS[0]], on_thread_time=True)
        assert found == [lines * num_rows]
        products = 2.0 * num_rows * 3 * 80 * 256
        expected = (products, 0.0) if kind == "none" else (0.0, products)
        assert replay.count_work() == [LaunchWork(float(packed.num_bytes), *expected)]
    assert (out == 7.0).all(), "a loop must not write"


# A head of 16 has eight lines of keys and eight of values per sixteen positions; two heads of two queries, two layers.
@pytest.mark.parametrize(
    ("step", "dtype", "lines"),
    [
        (StepShape(3, 1, 40), "auto", 3 * (3 * 16) * 2 * 2 * 2),
        (StepShape(3, 1, 200), "auto", 3 * (13 * 16) * 2 * 2 * 2),
        (StepShape(1, 4, 200), "auto", (13 * 16) * 2 * 8 * 2),
        (StepShape(3, 1, 200), "int8", 3 * (13 * 8) * 2 * 2 * 2),
    ],
)
def test_a_loop_multiplies_the_context_of_each_sequence_by_the_rows_of_its_group(
    tiny: str, step: StepShape, dtype: str, lines: int
) -> None:
    _loaded, replays = captured(tiny, "none", step, dtype)
    forms = [FORMS[0]] * len(replays[0].graph)
    found = replays[0].time_loops(forms, on_thread_time=False)[1]
    kinds = replays[0].graph.describe()
    assert sum(count for count, kind in zip(found, kinds, strict=True) if kind == "Attention") == lines


# The loops of a path are compiled first, which takes half a minute.
@pytest.mark.parametrize(
    "path", [path if path == "avx2" else pytest.param(path, marks=pytest.mark.nightly) for path in PATHS]
)
def test_loops_multiply_everything_on(path: str) -> None:
    if path == library.isa():
        pytest.skip("this process runs the same tests on this path")
    if path not in supported():
        pytest.skip(f"this processor has no {path}")
    done = run(
        ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", "loop_multiplies", __file__], FD_CPU_ISA=path
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]


LAYERS, HEAD, ATTENTION = 98_304, 4096 * 64, 4.0 * 2 * 4 * 16  # weights; operations per row and visible position
KV_BYTES = 256  # of a position
TWO_LIMBS = (
    2 if library.isa().startswith("avx512") else 1
)  # products of bytes by the two bytes of an input, or of words


def visible_positions(step: StepShape) -> float:
    return step.rows * (step.context - (step.rows_each - 1) / 2)


@pytest.mark.parametrize(
    ("quantization", "products"), [("none", 0), ("wint8", TWO_LIMBS), ("wint4", TWO_LIMBS), ("w8a8", 1), ("w4a8", 1)]
)
@pytest.mark.parametrize("step", [StepShape(3, 1, 40), StepShape(1, 4, 200)])
def test_the_work_of_a_step_is_that_of_its_weights_and_visible_positions(
    tiny: str, quantization: str, products: int, step: StepShape
) -> None:
    loaded, replays = captured(tiny, quantization, step)
    total = total_work(replays)
    streamed = int(loaded.engine.describe()["streamed_weights_bytes"])
    assert total.num_bytes == streamed + KV_BYTES * step.num_requests * step.context
    weights, attention = 2.0 * step.rows * (LAYERS + HEAD), ATTENTION * visible_positions(step)
    expected = (attention, products * weights) if products else (attention + weights, 0.0)
    assert (total.bf16_operations, total.int8_operations) == expected


@pytest.mark.parametrize("quantization", ["none", "w4a8"])
def test_the_work_of_experts_is_that_of_those_that_have_rows(tiny_experts: str, quantization: str) -> None:
    step = StepShape(1, 5, 40)
    loaded, replays = captured(tiny_experts, quantization, step)
    kinds = dict[str, LaunchWork]()
    for replay in replays:
        for kind, work in zip(replay.graph.describe(), replay.count_work(), strict=True):
            kinds[kind] = kinds.get(kind, LaunchWork(0.0, 0.0, 0.0)) + work
    products = 2.0 * 2 * step.rows * 2 * 3 * 64 * 32  # two layers, two experts of three matrices per row
    of_experts = kinds["ExpertsUp"] + kinds["ExpertsDown"]
    assert of_experts.bf16_operations + of_experts.int8_operations == products
    assert 0 < of_experts.num_bytes < int(loaded.engine.describe()["weights_bytes"])
    assert kinds["Route"] == LaunchWork(2 * 8 * 64 * 4.0, 2 * step.rows * 8 * 64 * 2.0, 0.0), (
        "gates of dummies are fp32"
    )
    forms = [LoopForm(1, 1 << 12)] * len(replays[0].graph)
    _, lines = replays[0].time_loops(forms, False)
    looped = dict(zip(replays[0].graph.describe(), lines, strict=True))
    assert looped["ExpertsUp"] > looped["ExpertsDown"] > 0 and looped["Route"] == 0


def test_replays_are_captured_for_one_step_and_leave_it_unchanged(tiny: str) -> None:
    loaded, replays = captured(tiny, "none", StepShape(2, 1, 40))
    assert [(replay.num_rows, replay.num_seqs) for replay in replays] == [(2, 2), (2, 2)]
    head = "Linear with block maxima [4096, 64]"
    assert replays[1].graph.describe() == ["Gather", head, "Sample", "VerifyDrafts"]
    deltas = loaded.engine.step()
    assert len(deltas) == 2 and len(replays) == 2


def test_the_faster_of_loop_and_kernel_counts() -> None:
    floors = LaunchFloors(
        forms={"a": FORMS[0], "b": FORMS[0]},
        work={"a": LaunchWork(50, 100, 0), "b": LaunchWork(10, 100, 800)},
        loops_s=[{"a": 5.0, "b": 7.0}, {"a": 6.0, "b": 3.0}, {"a": 5.0, "b": 7.5}],
        kernels_s=[{"a": 8.0, "b": 4.0}, {"a": 5.5, "b": 5.0}, {"a": 9.0, "b": 4.5}],
    )
    assert floors.by_kernel() == ["b"]
    assert floors.attainable_s() == [9.0, 11.0, 9.5]


def test_a_group_is_measured_in_the_form_that_was_fastest_in_the_trials(
    tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _loaded, replays = captured(tiny, "w4a8", StepShape(2, 1, 40))
    used: list[tuple[int, int, int]] = []

    def time_loops(self: Replay, forms: list[LoopForm], on_thread_time: bool) -> tuple[list[float], list[int]]:
        tried = [values_of(form) for form in forms]
        used.extend(tried)
        return [0.5 if form == (2, 1 << 14, 0) else 1.0 for form in tried], [0] * len(forms)

    monkeypatch.setattr(Replay, "time_loops", time_loops)
    floors = LaunchFloors()
    floors.measure(replays)
    assert len(set(used)) == len(FORMS)
    used.clear()
    floors.measure(replays)
    assert set(used) == {(2, 1 << 14, 0)}
    assert len(floors.loops_s) == len(floors.kernels_s) == 2
    assert floors.loops_s[1]["Attention"] == 0.5 * 2, "two layers"
    assert "RmsNorm" not in floors.work and "Gather" not in floors.work


def values_of(form: LoopForm) -> tuple[int, int, int]:
    return form.streams, form.ahead_bytes, form.interleaves_row_blocks


def captured(
    tiny: str, quantization: str, step: StepShape, kv_cache_dtype: str = "auto"
) -> tuple[ShapeEngine, list[Replay]]:
    """Return an engine after two steps, the second of this shape, and the replays of that one."""
    loaded = ShapeEngine.load(
        tiny, quantization, max_num_seqs=3, max_model_len=240, max_drafts=7, kv_cache_dtype=kv_cache_dtype
    )
    loaded.skip_prefill()
    loaded.start(replace(step, context=step.context - 1), num_steps=4)
    loaded.engine.step()
    return loaded, capture_replays(loaded.engine.step)
