# SPDX-License-Identifier: Apache-2.0
"""The campaign: slices of requests and faults, one line per slice.

    python -m tests.cluster.campaign --log campaign.txt --clusters 0-19 [--real]

runs eight slices on each of these clusters. Clusters that are `ok` in the log already are skipped, so that it can be
run in parts. After a slice with problems, the output of all servers is beside the log, and the status is 1.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from fastdeploy.ipc.child import DEFAULT_FACTORY
from tests.cluster.bodies import MODEL, Reference
from tests.cluster.clients import Answer, ask_any, make_client
from tests.cluster.cluster import Cluster, Shape
from tests.cluster.faults import Faults
from tests.cluster.leftovers import check_clean, check_ended
from tests.cluster.plan import DEAD_FOR_GOOD, SLICES_PER_CLUSTER, Plan, draw_cluster, draw_plan

ENDS_WITHIN_S = 60.0
CAMPAIGN_FLAGS = ("--scheduler-patience", "2", "--splitwise-min-prompt", "0")
MOCK_OPTIONS = {"step_s": 0.02}


@dataclass
class Report:
    """What came of one slice.

    Attributes:
        num_events: kills, stops, wakings and events of Redis that took place.
        problems: what must not be; empty if all is right.
        errors: those that are allowed.
        slowest_s: time of the slowest request.
    """

    plan: Plan
    shape: Shape
    persistence: str
    outcomes: Counter[str] = field(default_factory=Counter)
    num_events: int = 0
    num_retries: int = 0
    problems: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    slowest_s: float = 0.0
    seconds: float = 0.0

    def __str__(self) -> str:
        outcomes = " ".join(f"{name}={count}" for name, count in sorted(self.outcomes.items()))
        verdict = "; ".join(self.problems) or "; ".join(["ok", *sorted(set(self.errors))])
        where = f"slice {self.plan.seed} {self.shape} redis={self.persistence}"
        counts = f"events={self.num_events} {outcomes} retries={self.num_retries}"
        return f"{where} [{self.plan}] {counts} {self.slowest_s:.1f} of {self.seconds:.1f}s: {verdict}"


def judge(answer: Answer, expected: Answer, faults: Faults) -> tuple[str, str]:
    """Return in one word how an answer ended, and what is wrong with it; "" if nothing is."""
    if not answer.begins(expected):
        return "wrong", f"other tokens than those of one node ({answer.outcome()})"
    if answer.equals(expected):
        return "right", ""
    if answer.is_complete and answer.error is None:
        return "wrong", "all tokens are right, but not the whole answer"
    if answer.broken and faults.may_break(answer):
        return "broken", ""
    if answer.error is not None and faults.may_fail(answer):
        return "error", ""
    return "lost", answer.outcome()


async def run_slice(cluster: Cluster, plan: Plan) -> tuple[list[Answer], Faults]:
    """Send the requests of a slice while its events happen; return the answers once all have ended."""
    faults = Faults(cluster, plan)
    async with make_client() as client:

        async def request(index: int) -> Answer:
            asked = plan.requests[index]
            await asyncio.sleep(asked.at_s)
            return await ask_any(client, lambda: cluster.urls, asked.node, asked.body, ENDS_WITHIN_S)

        happening = asyncio.create_task(faults.run())
        answers = await asyncio.gather(*map(request, range(len(plan.requests))))
        faults.is_over = True
        await happening
    return list(answers), faults


def run_and_judge(cluster: Cluster, plan: Plan, reference: Reference, persistence: str) -> Report:
    """Run one slice and return its report; the cluster is healed afterwards, if Redis lives."""
    report, began_s = Report(plan, cluster.shape, persistence), time.monotonic()
    expected = reference.answers([asked.body for asked in plan.requests])
    cluster.arm(plan.faults)
    answers, faults = asyncio.run(run_slice(cluster, plan))
    for asked, answer, right in zip(plan.requests, answers, expected, strict=True):
        word, problem = judge(answer, right, faults)
        report.outcomes[word] += 1
        report.num_retries += answer.num_retries
        report.slowest_s = max(report.slowest_s, answer.ended_s - answer.began_s)
        if word == "error":
            report.errors.append(answer.outcome())
        if problem:
            report.problems.append(f"{asked.body['request_id']} on node {answer.node}: {problem}")
    report.num_events, report.problems[:0] = faults.num_events, faults.problems
    if DEAD_FOR_GOOD not in [event.action for event in plan.events]:
        try:
            cluster.heal()
            check_clean(cluster)
        except AssertionError as error:
            report.problems.append(str(error))
    report.seconds = time.monotonic() - began_s
    return report


def run_cluster(
    cluster_seed: int, reference: Reference, folder: Path, is_real: bool = False, num_slices: int = SLICES_PER_CLUSTER
) -> Iterator[Report]:
    """Run the slices of one cluster; stop after one with problems, because the next ones would have them too."""
    shape, persistence = draw_cluster(cluster_seed)
    real = {"factory": DEFAULT_FACTORY, "model": "demo"} if is_real else MOCK_OPTIONS
    with Cluster(shape, folder, CAMPAIGN_FLAGS, persistence, **real) as cluster:
        for number in range(num_slices):
            is_last = number == num_slices - 1
            plan = draw_plan(cluster_seed * SLICES_PER_CLUSTER + number, shape, is_last, is_real)
            report = run_and_judge(cluster, plan, reference, persistence)
            if is_last and not report.problems:
                _end(cluster, report)
            if report.problems:
                cluster.write_logs(folder / "servers.log")
            yield report
            if report.problems:
                return


def _end(cluster: Cluster, report: Report) -> None:
    try:
        if DEAD_FOR_GOOD in [event.action for event in report.plan.events]:
            cluster.heal()
        check_ended(cluster)
    except AssertionError as error:
        report.problems.append(str(error))


def main() -> int:
    """Run the campaign from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--clusters", default="0-19", help="first and last seed")
    parser.add_argument("--slices", type=int, default=SLICES_PER_CLUSTER)
    parser.add_argument("--real", action="store_true", help="the engine with the demo model, not the mock")
    args = parser.parse_args()
    first, _, last = args.clusters.partition("-")
    args.log.touch()
    failed = False
    with tempfile.TemporaryDirectory() as folder, single_node(Path(folder), args.real) as alone:
        reference = Reference(alone.urls[0])
        for seed in range(int(first), int(last or first) + 1):
            if f"\ncluster {seed} ok" in args.log.read_text():
                continue
            failed |= _run_to_log(seed, reference, Path(folder) / str(seed), args)
    return int(failed)


def _run_to_log(seed: int, reference: Reference, folder: Path, args: argparse.Namespace) -> bool:
    """Run one cluster, write its lines, and return whether there were problems."""
    num_events, has_problems = 0, False
    with args.log.open("a") as log:
        for report in run_cluster(seed, reference, folder, args.real, args.slices):
            num_events, has_problems = num_events + report.num_events, has_problems or bool(report.problems)
            for stream in (log, sys.stdout):
                print(report, file=stream, flush=True)
        if has_problems:
            shutil.copy(folder / "servers.log", args.log.with_suffix(f".{seed}.servers"))
        print(f"cluster {seed} {'had problems' if has_problems else 'ok'}: {num_events} events", file=log)
    return has_problems


def single_node(folder: Path, is_real: bool = False) -> Cluster:
    """Return a cluster of one node that works alone and gives the expected answers."""
    real = {"factory": DEFAULT_FACTORY, "model": "demo"} if is_real else {}
    return Cluster(Shape("local", ("mixed",)), folder / "alone", ("--served-model-name", MODEL), **real)


if __name__ == "__main__":
    sys.exit(main())
