# SPDX-License-Identifier: Apache-2.0
"""The load of the engine in a header of answers, which load balancers ask for (ORCA, Open Request Cost Aggregation)."""

from __future__ import annotations

import json

from starlette.datastructures import Headers
from starlette.types import Scope

from fastdeploy.core.stats import EngineStats

FORMAT_HEADER = "endpoint-load-metrics-format"
REPORT_HEADER = "endpoint-load-metrics"
FORMATS = ("TEXT", "JSON")


def load_report(scope: Scope, stats: EngineStats) -> str | None:
    """Return the value of `endpoint-load-metrics`; None if the request asks for no report, or for another format."""
    wanted = Headers(scope=scope).get(FORMAT_HEADER, "").upper()
    metrics = {"kv_cache_usage_perc": stats.cache_usage, "num_requests_waiting": float(stats.num_waiting)}
    match wanted:
        case "TEXT":
            return "TEXT " + ", ".join(f"named_metrics.{name}={value}" for name, value in metrics.items())
        case "JSON":
            return "JSON " + json.dumps({"named_metrics": metrics})
    return None
