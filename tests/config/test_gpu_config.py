# SPDX-License-Identifier: Apache-2.0
"""Flags of a GPU: which device, how much of its memory, and which CUDA graphs; on the CPU they have no effect."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastdeploy.config import machine
from fastdeploy.config.args import ServeArgs, engine_config_from_kwargs, parse_serve_args
from fastdeploy.core.errors import ConfigError

NO_GRAPHS = "there are no CUDA graphs and no graph compiler on the CPU"


def on_gpu(*flags: str) -> ServeArgs:
    return parse_serve_args(["demo", "--device", "gpu", *flags])


def error_of(*flags: str) -> str:
    with pytest.raises(ConfigError) as caught:
        on_gpu(*flags)
    return str(caught.value)


@pytest.mark.parametrize(
    ("flags", "note"),
    [
        (
            ["--gpu-memory-utilization", "0.8"],
            "--gpu-memory-utilization 0.8 has no effect: the CPU has no device memory; use --kv-cache-memory",
        ),
        (["--enforce-eager"], f"--enforce-eager True has no effect: {NO_GRAPHS}"),
        (["-cc", '{"mode":3}'], f"--compilation-config {{'mode': 3}} has no effect: {NO_GRAPHS}"),
        (
            ["--graph-optimization-config", '{"use_cudagraph":true}'],
            f"--graph-optimization-config {{'use_cudagraph': True}} has no effect: {NO_GRAPHS}",
        ),
    ],
)
def test_on_the_cpu_each_flag_has_one_line(flags: list[str], note: str) -> None:
    assert parse_serve_args(["demo", *flags]).notes == (note,)


def test_on_a_gpu_flags_that_are_honoured_need_no_line() -> None:
    args = on_gpu("--gpu-memory-utilization", "0.5", "--enforce-eager", "-cc", '{"cudagraph_mode":"full"}')
    assert args.notes == ()
    assert (args.engine.gpu.gpu_memory_utilization, args.engine.gpu.captured_rows) == (0.5, ())


@pytest.mark.parametrize(
    ("flags", "rows"),
    [
        ([], None),
        (["--enforce-eager"], ()),
        (["--graph-optimization-config", '{"use_cudagraph":false}'], ()),
        (["--graph-optimization-config", '{"use_cudagraph":true}'], None),
        (["--compilation-config", '{"cudagraph_mode":"none"}'], ()),
        (["--compilation-config", '{"cudagraph_mode":"FULL_DECODE_ONLY"}'], None),
        (["--compilation-config", '{"cudagraph_mode":"PIECEWISE","cudagraph_capture_sizes":[8,1,8]}'], (1, 8)),
        (["-cc.cudagraph_capture_sizes", "[]"], ()),
        (["--graph-optimization-config", '{"cudagraph_capture_sizes":[4,512,1024]}'], (4, 512)),
        (["--graph-optimization-config", '{"cudagraph_capture_sizes":null}'], None),
        (["--enforce-eager", "-cc", '{"cudagraph_capture_sizes":[4]}'], ()),
    ],
)
def test_graphs_are_captured_for_the_configured_numbers_of_rows(flags: list[str], rows: tuple[int, ...] | None) -> None:
    assert on_gpu(*flags).engine.gpu.captured_rows == rows


def test_other_keys_of_both_servers_are_accepted_and_said_once() -> None:
    args = on_gpu(
        *("--graph-optimization-config", '{"use_cudagraph":true,"graph_opt_level":2,"full_cuda_graph":true}'),
        *("--compilation-config", '{"mode":3}'),
    )
    reason = "no effect: operators are compiled at installation, and graphs are captured when they are first used"
    assert args.notes == (
        f"--graph-optimization-config: graph_opt_level, full_cuda_graph have {reason}",
        f"--compilation-config: mode has {reason}",
    )


def test_sizes_beyond_the_largest_graph_are_said() -> None:
    args = on_gpu("-cc", '{"cudagraph_capture_sizes":[4,1024]}')
    assert args.notes == ("--compilation-config: steps of more than 512 rows are not captured",)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["-cc", '{"cudagraph_capture_size":[1]}'],
            "compilation_config.cudagraph_capture_size: unknown key; did you mean 'cudagraph_capture_sizes'?",
        ),
        (["-cc", '{"zzz":1}'], "compilation_config.zzz: unknown key"),
        (
            ["--graph-optimization-config", '{"use_cudagraph":1}'],
            "graph_optimization_config.use_cudagraph: expected true or false, got 1",
        ),
        (
            ["-cc", '{"cudagraph_mode":"SOME"}'],
            "compilation_config.cudagraph_mode: expected one of NONE, PIECEWISE, FULL, FULL_DECODE_ONLY, "
            "FULL_AND_PIECEWISE, got 'SOME'",
        ),
        (
            ["-cc", '{"cudagraph_capture_sizes":[0]}'],
            "compilation_config.cudagraph_capture_sizes: expected a list of positive integers, got [0]",
        ),
        (
            [
                "-cc",
                '{"cudagraph_capture_sizes":[1]}',
                "--graph-optimization-config",
                '{"cudagraph_capture_sizes":[2]}',
            ],
            "compilation_config.cudagraph_capture_sizes: contradicts graph_optimization_config",
        ),
        (
            ["-tp", "2"],
            "--tensor-parallel-size 2: is refused, leave it out: more than one rank is not available with --device gpu",
        ),
    ],
)
def test_what_a_gpu_cannot_do_is_refused_by_name(flags: list[str], message: str) -> None:
    assert error_of(*flags) == message


def test_one_rank_is_accepted_on_a_gpu() -> None:
    assert on_gpu("-tp", "1").notes == ()


@pytest.mark.parametrize("device", ["gpu", "gpu:1", "cuda"])
def test_a_gpu_may_be_named(device: str) -> None:
    config, _ = engine_config_from_kwargs({"model": "demo", "device": device})
    assert config.device == device.replace("cuda", "gpu")


@pytest.mark.parametrize("device", ["xpu", "gpu:", "gpu:a", "cpu:1"])
def test_other_devices_are_refused_with_the_list(device: str) -> None:
    with pytest.raises(ConfigError, match=f"device: expected auto, cpu, gpu, or gpu:1 .* got '{device}'"):
        parse_serve_args(["demo", "--device", device])


@pytest.mark.parametrize(
    ("num_gpus", "is_emulated", "expected"), [(2, False, "gpu"), (0, False, "cpu"), (2, True, "cpu")]
)
def test_auto_is_a_gpu_that_exists_and_never_the_emulated_one(
    monkeypatch: pytest.MonkeyPatch, num_gpus: int, is_emulated: bool, expected: str
) -> None:
    monkeypatch.setattr(machine, "count_gpus", lambda: num_gpus)
    monkeypatch.setenv("FD_GPU_EMULATED", "1" if is_emulated else "0")
    assert parse_serve_args(["demo", "--device", "auto"]).engine.device == expected


def test_without_a_library_there_are_no_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "GPU_LIBRARY", tmp_path / "libfd_gpu.so")
    assert machine.count_gpus() == 0


def test_a_rank_is_refused_on_the_gpu_that_auto_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "count_gpus", lambda: 1)
    monkeypatch.setenv("FD_GPU_EMULATED", "0")
    with pytest.raises(ConfigError, match="more than one rank"):
        parse_serve_args(["demo", "--device", "auto", "-tp", "2"])
