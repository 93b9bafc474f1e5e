# SPDX-License-Identifier: Apache-2.0
"""`fastdeploy collect-env`: versions, hardware and limits for a bug report."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

from fastdeploy.config.env import shown_variables
from fastdeploy.config.machine import GPU_LIBRARY, available_memory_bytes
from fastdeploy.entrypoints.cli.operators import describe_device
from fastdeploy.entrypoints.cli.parser import CommandParser
from fastdeploy.version import __version__

PACKAGES = (
    "paddlepaddle",
    "paddlepaddle-gpu",
    "paddlenlp",
    "numpy",
    "tokenizers",
    "safetensors",
    "llguidance",
    "msgspec",
    "pyzmq",
    "redis",
    "fastapi",
    "starlette",
    "uvicorn",
    "uvloop",
    "huggingface_hub",
    "openai",
)
INSTRUCTION_SETS = (
    *("avx", "avx2", "fma", "bmi2", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512_vnni"),
    *("avx512_bf16", "avx512_fp16", "amx_tile", "amx_int8", "amx_bf16", "asimd", "bf16", "sve"),
)
VARIABLES = ("OMP_", "CUDA_VISIBLE_DEVICES", "HF_HOME", "HF_ENDPOINT", "FLAGS_", "NVIDIA_VISIBLE_DEVICES")
GPU_LIBRARY_SCRIPT = """
import ctypes, sys
library, count = ctypes.CDLL(sys.argv[1]), ctypes.c_int()
for name in ("fd_library_version", "fd_library_hash", "fd_last_error"):
    getattr(library, name).restype = ctypes.c_char_p
failed = library.fd_device_count(ctypes.byref(count))
found = library.fd_last_error().decode() if failed else f"number of GPUs: {count.value}"
print(f"{library.fd_library_version().decode()}+{library.fd_library_hash().decode()} ({found})")
"""
CGROUP = Path("/sys/fs/cgroup")
TIMEOUT_S = 120


def main(arguments: list[str]) -> int:
    """Print one line per item, or one JSON document."""
    parser = CommandParser("collect-env", "Print versions, hardware and limits for a bug report. Secrets are masked.")
    parser.add_argument("--json", action="store_true", help="print a JSON document")
    args = parser.parse_own(arguments)
    report = collect()
    if args.json:
        print(json.dumps(report, indent=2))
        return 0
    for name, value in report.items():
        if isinstance(value, dict):
            print(f"{name}:")
            print("\n".join(f"  {key}: {item}" for key, item in value.items()) or "  none")
        else:
            print(f"{name}: {value}")
    return 0


def collect() -> dict[str, Any]:
    """Return item -> value, or the reason why it is not available."""
    return {name: _collect_item(read) for name, read in ITEMS.items()}


def _collect_item(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except Exception as error:  # the report is useful without this item
        return f"not available: {type(error).__name__}: {error}"


def _cpu() -> dict[str, Any]:
    text = Path("/proc/cpuinfo").read_text()
    fields: dict[str, str] = {}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    return {
        "model": fields.get("model name", platform.machine()),
        "cores": f"{len(os.sched_getaffinity(0))} usable of {os.cpu_count()}",
        "instruction sets": " ".join(name for name in INSTRUCTION_SETS if name in flags),
        "cgroup cpu.max": _read(CGROUP / "cpu.max"),
    }


def _memory() -> dict[str, str]:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "total": _gib(total),
        "available": _gib(available_memory_bytes()),
        "cgroup memory.max": _read(CGROUP / "memory.max"),
    }


def _packages() -> dict[str, str]:
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _operator_library() -> str:
    """Load the library in a child process, because one that was built for another processor kills its process."""
    found = describe_device("cpu")
    if "error" in found:
        return f"not available ({found['error']})"
    return f"{found['operator_library']} (path {found['isa']})"


def _gpu_library() -> str:
    """Load the library of GPU operators in a child process, too, and return how many GPUs it finds, or why none."""
    if not GPU_LIBRARY.exists():
        return "none (FD_BUILD_GPU builds it)"
    command = [sys.executable, "-c", GPU_LIBRARY_SCRIPT, str(GPU_LIBRARY)]
    child = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    if child.returncode != 0:
        return f"not available (exit status {child.returncode}): {(child.stderr.strip().splitlines() or [''])[-1]}"
    return child.stdout.strip()


def _gpus() -> str:
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        child = subprocess.run(query, capture_output=True, text=True, timeout=TIMEOUT_S)
    except FileNotFoundError:
        return "none (nvidia-smi not found)"
    return "; ".join(child.stdout.strip().splitlines()) or f"none ({child.stderr.strip()})"


def _environment() -> dict[str, str]:
    others = {name: value for name, value in sorted(os.environ.items()) if name.startswith(VARIABLES)}
    return {**shown_variables(), **others}


def _os() -> str:
    release = platform.freedesktop_os_release().get("PRETTY_NAME", "")
    return f"{release}, kernel {platform.release()}, {' '.join(platform.libc_ver())}"


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError as error:
        return f"not available: {error.strerror}"


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"


ITEMS: dict[str, Callable[[], Any]] = {
    "fastdeploy": lambda: __version__,
    "operator library": _operator_library,
    "gpu operator library": _gpu_library,
    "python": lambda: f"{platform.python_version()} ({sys.executable})",
    "os": _os,
    "cpu": _cpu,
    "memory": _memory,
    "gpus": _gpus,
    "packages": _packages,
    "environment": _environment,
}
