# SPDX-License-Identifier: Apache-2.0
"""What the server prints while it starts: progress, and a summary of the configuration."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from fastdeploy.config.api_keys import ApiKey
from fastdeploy.config.cluster_config import ClusterConfig
from fastdeploy.version import __version__

BAR_WIDTH = 30
MAX_KEYS = 8  # that are shown


class ProgressBar:
    """Shows a progress bar on stderr if that is a terminal."""

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._task = ""
        self._last_shown = -1

    def show(self, task: str, fraction: float) -> None:
        """Show that `fraction` of `task` is done."""
        if not self._is_terminal:
            return
        if task != self._task:
            self._task, self._last_shown = task, -1
        percent = int(fraction * 100)
        if percent == self._last_shown:
            return
        self._last_shown = percent
        filled = round(fraction * BAR_WIDTH)
        bar = "#" * filled + "." * (BAR_WIDTH - filled)
        end = "\n" if fraction >= 1 else ""
        print(f"\r{task:<20} [{bar}] {fraction:4.0%}", end=end, file=sys.stderr, flush=True)


def print_first_line(model: str) -> None:
    """Print that a start has begun, which takes seconds until there is more to say."""
    print(f"FastDeploy {__version__}, loading {model}", flush=True)


def summary_lines(
    description: Mapping[str, Any],
    notes: Sequence[str],
    cluster: ClusterConfig | None = None,
    tool_calls: str = "",
    more_rows: Mapping[str, str] | None = None,
) -> list[str]:
    """Return the start-up summary: model, context, memory, speculation, numerics and cluster, then the notes.

    Args:
        tool_calls: the format of tool calls, and where it comes from.
        more_rows: rows to add, of `server_rows`.
    """
    cache = description.get("kv_cache", {})
    speculation = description.get("speculation", {})
    numerics = description.get("fingerprint", {})
    rows = {
        "model": _joined(description.get("model"), description.get("architecture"), numerics.get("dtype")),
        "context": _context(description) + _batch(description),
        "weights": _weights(description, numerics.get("quantization", "none")),
        "KV cache": _joined(
            f"{cache.get('num_blocks')} blocks of {cache.get('block_size')}",
            f"{cache.get('num_tokens')} tokens",
            _bytes(cache.get("bytes", 0)) + (f" ({cache['bound']})" if cache.get("bound") else ""),
            cache.get("dtype"),
        ),
        "speculation": _speculation(speculation),
        "tool calls": tool_calls,
        "numerics": _joined(numerics.get("isa"), numerics.get("operator_library")),
        **(_cluster(cluster, description) if cluster is not None and cluster.is_clustered else {}),
        **(more_rows or {}),
    }
    lines = [f"FastDeploy {__version__}"]
    lines += [f"  {name:<12} {text}" for name, text in rows.items() if text]
    return lines + [f"  note: {note}" for note in notes]


def server_rows(keys: Sequence[ApiKey], processes: Mapping[str, Sequence[int]]) -> dict[str, str]:
    """Return the rows about the keys of clients, by name and weight, and about the processes, by what they do."""
    shown = [f"{key.name} (weight {key.weight:g}{', admin' * key.admin})" for key in keys[:MAX_KEYS]]
    if num_more := len(keys) - len(shown):
        shown.append(f"and {num_more} more")
    ids = (f"{name} {' '.join(map(str, process_ids))}" for name, process_ids in processes.items())
    return {"API keys": _joined(*shown), "processes": _joined(*ids)}


def _cluster(cluster: ClusterConfig, description: Mapping[str, Any]) -> dict[str, str]:
    """Return the rows about a node among others: what it does and where it meets them, and how KV blocks travel."""
    role = cluster.splitwise_role if cluster.is_split else ""
    topic, node = f"topic {cluster.scheduler_topic}", f"node {cluster.node_id}"
    rows = {"cluster": _joined(cluster.scheduler_name, role, topic, node, cluster.address)}
    if cluster.is_split:
        arena = description.get("cluster", {})
        slots = arena.get("num_slots") and f"{arena['num_slots']} slots"
        rows["KV transfer"] = _joined(*cluster.connectors, slots, arena.get("bytes") and _bytes(arena["bytes"]))
    return rows


def _joined(*parts: Any) -> str:
    return ", ".join(str(part) for part in parts if part)


def _weights(description: Mapping[str, Any], quantization: str) -> str:
    if "weights_bytes" not in description:
        return ""
    formats = "" if quantization == "none" else f"quantized: {quantization}"
    mapped = "mapped from packed_weights.data" if description.get("weights_are_mapped") else ""
    return _joined(_bytes(description["weights_bytes"]), formats, mapped)


def _context(description: Mapping[str, Any]) -> str:
    own = description.get("model_context")
    return f"{description.get('max_model_len')} of the model's {own} tokens" if own else "unknown"


def _batch(description: Mapping[str, Any]) -> str:
    if "max_num_seqs" not in description:
        return ""
    return f", {description['max_num_seqs']} requests and {description.get('max_num_batched_tokens')} tokens per step"


def _speculation(speculation: Mapping[str, Any]) -> str:
    if speculation.get("method", "naive") == "naive":
        return "off"
    size, extension, by_model = _drafting_model(speculation), speculation.get("extension"), ""
    if extension:
        size, by_model = f" with {extension}{size}", f", {speculation['num_model_steps']} of them by the model"
        by_model = by_model.replace("the model", "the MTP layer") if speculation.get("mtp") else by_model
    count = speculation.get("num_speculative_tokens")
    text = (
        f"{speculation['method']}{size}, up to {count} draft{'' if count == 1 else 's'}{by_model}, "
        f"verify {speculation.get('verify_strategy')}, accept {speculation.get('accept_policy')}"
    )
    return text + (" -- LOSSY: the text may differ from plain decoding" if speculation.get("lossy") else "")


def _drafting_model(speculation: Mapping[str, Any]) -> str:
    """Return what drafts, and its size; empty if no model does."""
    if draft := speculation.get("draft_model"):
        return f" {draft['model']} ({_bytes(draft['weights_bytes'])})"
    model = speculation.get("mtp") or speculation.get("head")
    if not model:
        return ""
    parts = [_bytes(model["weights_bytes"])]
    if taps := model.get("taps"):
        parts.append(f"inputs of layers {', '.join(map(str, taps))}")
    parts.append(f"head {model['head']} {_bytes(model['heads_bytes'])}" if model["heads_bytes"] else "the model's head")
    return f"{' ' + model['model'] if 'model' in model else ''} ({', '.join(parts)})"


def _bytes(count: int) -> str:
    if count < 2**20:
        return f"{count / 2**10:.0f} KiB"
    return f"{count / 2**20:.0f} MiB" if count < 2**30 else f"{count / 2**30:.1f} GiB"
