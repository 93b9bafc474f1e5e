# SPDX-License-Identifier: Apache-2.0
"""Every answer is that of one node alone while processes and Redis are killed, stopped and restarted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.bodies import Reference
from tests.cluster.campaign import run_cluster, single_node

NUM_CLUSTERS, NUM_REAL_CLUSTERS = 14, 4


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reference]:
    with single_node(tmp_path_factory.mktemp("alone")) as alone:
        yield Reference(alone.urls[0])


@pytest.mark.parametrize("cluster_seed", [105, 130])  # one prefill and one decode node; two mixed ones
def test_every_answer_is_that_of_one_node(reference: Reference, tmp_path: Path, cluster_seed: int) -> None:
    for report in run_cluster(cluster_seed, reference, tmp_path, num_slices=2):
        assert not report.problems, str(report)


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("cluster_seed", range(NUM_CLUSTERS))
def test_campaign(reference: Reference, tmp_path: Path, cluster_seed: int) -> None:
    for report in run_cluster(cluster_seed, reference, tmp_path):
        print(report)
        assert not report.problems, str(report)


@pytest.mark.nightly
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("cluster_seed", range(NUM_REAL_CLUSTERS))
def test_campaign_with_real_engines(tmp_path: Path, cluster_seed: int) -> None:
    with single_node(tmp_path, is_real=True) as alone:
        reference = Reference(alone.urls[0])
        for report in run_cluster(cluster_seed, reference, tmp_path, is_real=True):
            print(report)
            assert not report.problems, str(report)
