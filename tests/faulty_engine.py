# SPDX-License-Identifier: Apache-2.0
"""The real engine with faults: a `guided_regex` of FAULTS raises where its text says."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from fastdeploy.config.engine_config import EngineConfig
from fastdeploy.core.request import GenerationRequest
from fastdeploy.engine.engine import Engine

FACTORY = "tests.faulty_engine:make_engine"
FAULTS = ("prepare", "compile", "num_valid_tokens", "fill_bitmasks", "accept_token")


def raise_fault(*args: Any) -> Any:
    """Raise what no code of the engine expects."""
    raise TypeError("a fault")


def make_engine(config: EngineConfig, on_progress: Callable[[str, float], None] | None = None) -> Engine:
    """Build the engine that `config` describes and add the faults."""
    engine = Engine.from_config(config, on_progress)
    admission = engine.admission
    prepare, make_constraints = admission.prepare, admission._structured_output.make_constraints

    def prepare_or_raise(request: GenerationRequest) -> Future[Any] | None:
        return raise_fault() if fault_of(request) == "prepare" else prepare(request)

    def make_faulty_constraints(request: GenerationRequest) -> list[Any]:
        fault, constraints = fault_of(request), make_constraints(request)
        if fault == "compile":
            raise_fault()
        for constraint in constraints:
            if fault is not None:
                setattr(constraint, fault, raise_fault)
        return constraints

    admission.prepare = prepare_or_raise  # type: ignore[method-assign]
    admission._structured_output.make_constraints = make_faulty_constraints  # type: ignore[method-assign]
    return engine


def fault_of(request: GenerationRequest) -> str | None:
    """Return where the request is to fail; None if nowhere."""
    guided = request.params.guided_decoding
    return guided.regex if guided is not None and guided.regex in FAULTS else None
