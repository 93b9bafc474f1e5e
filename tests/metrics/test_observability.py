# SPDX-License-Identifier: Apache-2.0
"""The documentation and the dashboard name exactly the metrics that the server exports."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import generate_latest

from fastdeploy.metrics.server_metrics import ServerMetrics
from tests.entrypoints.server_process import ServerProcess, mock_server, sample
from tests.metrics.test_cluster_metrics import NODE
from tests.metrics.test_metrics import DESCRIPTION, STATS

ROOT = Path(__file__).resolve().parent.parent.parent
NAME = re.compile(r"\b(?:fastdeploy:|http_request)[a-z0-9_]+")


def page_of(is_clustered: bool) -> str:
    """Return the page of a server that has drafted and, with others, moved KV blocks."""
    stats = replace(STATS, node=NODE if is_clustered else None)
    metrics = ServerMetrics(lambda: stats, lambda: DESCRIPTION, is_clustered=is_clustered)
    return generate_latest(metrics.registry).decode()


def types_in(page: str) -> dict[str, str]:
    """Return the type of every metric, by name."""
    found = re.findall(r"^# TYPE (\S+) (\S+)$", page, re.MULTILINE)
    return {name: kind for name, kind in found if not name.endswith("_created")}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Run a server that has answered one request."""
    with mock_server(tmp_path_factory.mktemp("mock")) as server:
        server.post("/v1/completions", {"prompt": "the", "max_tokens": 3})
        server.get("/not/there")
        yield server


def documented(table_name: str = "metrics") -> dict[str, str]:
    text = (ROOT / "docs/guide/observability.md").read_text()
    table = text.split(f"<!-- {table_name}:", 1)[1].split(f"<!-- end of {table_name} -->", 1)[0]
    return dict(re.findall(r"^\| `(\S+)` \| (\w+) \|", table, re.MULTILINE))


def expressions() -> list[str]:
    dashboard = json.loads((ROOT / "scripts/grafana/fastdeploy.json").read_text())
    return [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]


def test_documentation_lists_every_metric_with_its_type() -> None:
    names = {re.sub(r"_rate_\d+$", "_rate_{i}", name): kind for name, kind in types_in(page_of(False)).items()}
    assert documented() == names


def test_documentation_lists_the_metrics_that_several_nodes_add() -> None:
    alone, clustered = types_in(page_of(False)), types_in(page_of(True))
    assert alone.items() <= clustered.items()
    assert documented("cluster metrics") == {name: kind for name, kind in clustered.items() if name not in alone}


def test_running_server_exports_the_documented_metrics(served: ServerProcess) -> None:
    page = served.get("/metrics").text
    missing = [name for name in documented() if "{i}" not in name and f"# TYPE {name} " not in page]
    assert missing == []


def test_the_memory_on_the_page_is_that_of_the_engine_process(served: ServerProcess) -> None:
    [engine] = served.engine_pids()
    status = Path(f"/proc/{engine}/status").read_text()
    resident = int(re.search(r"^VmRSS:\s+(\d+) kB$", status, re.MULTILINE)[1]) * 1024  # type: ignore[index]
    shown = sample(served.get("/metrics").text, "fastdeploy:engine_resident_memory_bytes")
    assert shown is not None and 0.8 < shown / resident < 1.25


def test_every_expression_of_the_dashboard_names_exported_samples(served: ServerProcess) -> None:
    page = served.get("/metrics").text + page_of(True)
    samples = set(re.findall(r"^([a-z0-9_:]+)[{ ]", page, re.MULTILINE))
    families = set(re.findall(r"^# TYPE (\S+) ", page, re.MULTILINE))  # a labelled one may have no sample yet
    assert len(expressions()) > 30
    for expression in expressions():
        names = NAME.findall(expression)
        assert names, expression
        assert [name for name in names if name not in samples | families] == [], expression


def test_unknown_paths_and_methods_share_one_series(served: ServerProcess) -> None:
    served.get("/also/not/there")
    page = served.get("/metrics").text
    found = re.findall(
        r'^http_requests_total\{.*method="GET",path="([^"]+)",.*status_code="404"\} (\S+)$', page, re.MULTILINE
    )
    assert found == [("other", "2.0")]


def test_grafana_panels_do_not_overlap() -> None:
    panels = json.loads((ROOT / "scripts/grafana/fastdeploy.json").read_text())["panels"]
    cells = [
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
