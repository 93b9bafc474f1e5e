# SPDX-License-Identifier: Apache-2.0
"""Which tests `pytest -m quick` runs: the first cases of each test that needs little time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

CASES_PER_TEST = 2
SLOW_MODULES = {  # start servers or other processes, train models, or search through many examples
    "cluster": "test_campaign test_failures test_harness test_node_routes test_rolling_restart",
    "benchmarks": """
        test_bench_quality test_bench_speculation test_bench_splitwise test_commands test_launches test_peers
    """,
    "detokenize": "test_chat_template",
    "engine": "test_engine_fuzz test_fair_share_fuzz test_hand_over_fuzz",
    "entrypoints": """
        test_bench test_border_fuzz test_cli test_clients test_cluster_secrets test_completion_fields
        test_connection_gate test_docs_pages test_endpoints test_faults test_formats test_http_protocol
        test_isolation test_lifecycle test_llm_threads test_load test_offline_interleavings
        test_openai_errors test_openapi_fuzz
        test_other_checkout test_page test_raw_fuzz test_real_server test_real_tools test_request_limits
        test_run_batch test_seeds test_seeds_pair test_server_flags
        test_speculation_control test_structured test_workers
    """,
    "exactness": "test_cut_texts test_faults test_paths",
    "metrics": "test_logs test_observability",
    "models": "test_load_memory test_mtp_layers test_mtp_training test_paths",
    "ops": "test_paths test_sampling_paths test_suffix_drafts",
    "scheduler": "test_request_states test_store_errors test_store_servers",
    "scripts": "test_build test_wheel",
}
TESTS = Path(__file__).parent


def slow_files() -> set[Path]:
    """Return the files of SLOW_MODULES."""
    return {TESTS / folder / f"{name}.py" for folder, names in SLOW_MODULES.items() for name in names.split()}


def mark_quick(items: Iterable[pytest.Item]) -> None:
    """Give the first cases of each test outside of SLOW_MODULES the marker `quick`."""
    slow, num_cases = slow_files(), Counter[tuple[Path, str]]()
    for item in items:
        if item.path in slow or item.get_closest_marker("nightly"):
            continue
        test = item.path, item.name.partition("[")[0]
        num_cases[test] += 1
        if num_cases[test] <= CASES_PER_TEST:
            item.add_marker("quick")
