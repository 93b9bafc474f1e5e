# SPDX-License-Identifier: Apache-2.0
"""Writes the table of operators in docs/guide/hardware.md from the registry: python -m scripts.make_hardware_table"""

from __future__ import annotations

from pathlib import Path

from custom_ops.tools.gpu_library import ARCHITECTURES
from fastdeploy.ops.registry import entries, find_backend
from fastdeploy.ops.report import register_all

PAGE = Path(__file__).resolve().parents[1] / "docs" / "guide" / "hardware.md"
BEGIN, END = "<!-- table: made by scripts/make_hardware_table.py -->", "<!-- end of table -->"
RAN_ON = dict.fromkeys(
    (
        "allocate_kv_cache",
        "append_attention",
        "draft",
        "embedding",
        "fill_stage",
        "first_outputs",
        "gather_rows",
        "linear",
        "logprobs",
        "pack_linear",
        "packed_embedding",
        "rms_norm",
        "sample",
        "scatter_rows",
        "shift_logits_rows",
        "verify_draft_tokens",
        "virtual_padding",
    ),
    "H100",
)
"""Operator -> on which cards it ran."""


def table() -> str:
    """Return a row for each operator: what compiles it, what executes it in tests, and what it ran on."""
    register_all()
    cpu, gpu = find_backend("cpu").kernels, find_backend("gpu").kernels
    compiled = ", ".join(f"sm_{number}" for number in ARCHITECTURES)
    lines = ["| operator | CPU | compiled for GPUs | executed by the emulator | ran on a card |", "| --- " * 5 + "|"]
    for name in sorted(entries()):
        cells = [
            f"`{name}`",
            "native" if name in cpu else "reference",
            compiled if name in gpu else "reference" if entries()[name].has_fallback else "not yet",
            "yes" if name in gpu else "",
            RAN_ON.get(name, "none yet") if name in gpu else "",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def fresh_page() -> str:
    """Return the page with a fresh table between its marks."""
    before, rest = PAGE.read_text().split(BEGIN)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(fresh_page())
