# SPDX-License-Identifier: Apache-2.0
"""All checks of a device, one operator after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import paddle
from numpy.typing import NDArray

from fastdeploy.ops import (
    attention,
    batch_index,
    drafting,
    embedding,
    gather,
    linear,
    logits,
    norm,
    registry,
    sampling,
    verify,
)
from fastdeploy.ops.backend import Backend
from fastdeploy.ops.device_check import golden
from fastdeploy.ops.device_check.examples import Poisoner, Products, compare, compute, digest, taken_by
from fastdeploy.ops.device_check.findings import GOLDEN, POISONED, REFERENCE, Finding, one_line
from fastdeploy.ops.device_check.report import write_line
from fastdeploy.ops.device_check.rows import check_rows
from fastdeploy.ops.registry import Lookup

FAMILIES = (
    attention,
    batch_index,
    drafting,
    embedding,
    gather,
    linear,
    logits,
    norm,
    sampling,
    verify,
)  # they register
HOST = "cpu"
SHORT_STRIDE = 3  # of an operator's examples, each third one is computed in the short form
FREED_ELEMENTS = 1 << 18

Results = Sequence[tuple[str, NDArray]]


@dataclass(frozen=True)
class Plan:
    """What is computed: for each operator the numbers of its examples, and the results of the reference."""

    examples: dict[str, list[int]]
    expected: dict[tuple[str, int], Results]


def make_plan(backend: Backend, operators: Sequence[str], is_short: bool) -> Plan:
    """Choose examples and compute their references on the host, whose backend is selected then.

    Args:
        operators: names in the registry; none means all that the backend has kernels for and that have examples.
    """
    with _no_messages():
        registry.select_backend(HOST)
    entries, stride = registry.entries(), SHORT_STRIDE if is_short else 1
    names = [name for name in entries if name in backend.kernels and name in (operators or entries)]
    examples = {name: taken_by(backend.device, name)[::stride] for name in names}
    expected: dict[tuple[str, int], Results] = {
        (name, index): compute(entries[name].examples[index], registry.lookup("reference"))
        for name, indexes in examples.items()
        for index in indexes
    }
    return Plan({name: indexes for name, indexes in examples.items() if indexes}, expected)


def run_checks(
    device: str,
    operators: Sequence[str] = (),
    is_short: bool = False,
    report: Path | None = None,
) -> Iterator[Finding]:
    """Check the operators of a device and select its backend; fastdeploy.ops.startup has prepared the process.

    Args:
        device: such as "gpu:1".
        operators: names in the registry; none means all that have kernels and examples.
        is_short: a few seconds instead of all examples and row counts.
        report: file that gets a JSON line with all names, one when an operator begins, and one per finding.
    """
    backend = registry.find_backend(device)
    plan = make_plan(backend, operators, is_short)
    with _no_messages():
        registry.select_backend(device)

    def lookup(name: str) -> Callable[..., object]:
        return backend.make_synchronous(backend.kernels[name])

    write_line(report, {"operators": list(plan.examples)})
    for name in plan.examples:
        write_line(report, {"begins": name})
        for finding in (*_check_examples(name, plan, lookup), *check_rows(name, lookup, is_short)):
            write_line(report, finding.as_dict())
            yield finding


def _check_examples(name: str, plan: Plan, lookup: Lookup) -> Iterator[Finding]:
    """Yield the findings of an operator's examples."""
    errors: dict[str, str] = {}
    num_cases = {REFERENCE: 0, GOLDEN: 0, POISONED: 0}
    known = golden.known_digests().get(name, {})
    for index in plan.examples[name]:
        example, products = registry.entries()[name].examples[index], Products(lookup)
        paddle.full([FREED_ELEMENTS], float("nan"))  # what is allocated next holds NaN
        num_cases[REFERENCE] += 1
        try:
            results = compute(example, products)
            error = compare(name, results, plan.expected[name, index])
        except Exception as failure:  # of a kernel: it has failed, whatever it was
            errors.setdefault(REFERENCE, f"example {index}: {one_line(failure)}")
            continue
        if error:
            errors.setdefault(REFERENCE, f"example {index}: {error}")
        if str(index) in known and not products.are_used:
            num_cases[GOLDEN] += 1
            if digest(results) != known[str(index)]:
                errors.setdefault(GOLDEN, f"example {index}: other bits than on other devices")
        num_cases[POISONED] += 1
        if error := Poisoner(lookup, name).find_error(example, results):
            errors.setdefault(POISONED, f"example {index}: {error}")
    for check, number in num_cases.items():
        if number:
            yield Finding(name, check, number, errors.get(check, ""))


@contextmanager
def _no_messages() -> Iterator[None]:
    """Silence the registry while a backend is selected for a check; its warnings belong to a start."""
    registry.logger.disabled = True
    try:
        yield
    finally:
        registry.logger.disabled = False
