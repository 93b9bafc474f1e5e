# SPDX-License-Identifier: Apache-2.0
"""A process that drafts with trained heads on a GPU and writes what they and the target computed.

    FD_GPU_EMULATED=1 python -m tests.engine.gpu.head_values FOLDER

FOLDER holds the small model, `target`, and heads by their methods; METHOD.npz is written beside them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fastdeploy.ops.startup import prepare

if __name__ == "__main__":
    prepare("gpu")  # before Paddle is imported

import numpy as np
from numpy.typing import NDArray
from paddle import Tensor

from fastdeploy.config.speculative_keys import parse_speculative_config
from fastdeploy.core.request import Draft, DraftQuota, GenerationRequest, Request
from fastdeploy.engine.engine_factory import make_engine
from fastdeploy.ops.registry import selected_backend
from tests.drafting_models import HEADS
from tests.engine.gpu.cells import Cell, changed, config_of, requests_of
from tests.exactness.requests import run_alone
from tests.spec_decode.drafting.engines import last_logits
from tests.spec_decode.drafting.recorded_states import RecordedStates

NUM_DRAFTS = 3


class WaitingStates(RecordedStates):
    """Records states of which the kernels have ended."""

    def read(self, layer: int, hidden: Tensor, num_rows: int) -> None:
        selected_backend().synchronize()
        super().read(layer, hidden, num_rows)


def draft(folder: Path, method: str) -> dict[str, NDArray[Any]]:
    """Decode a request with a head.

    Returns:
        `text` and, for each draft: `lengths` of the contexts, `counts` of ids, the `ids` [NUM_DRAFTS], and the `logits`
        of the last one over the head's own ids.
    """
    speculative = {"method": method, "model": str(folder / method), "num_speculative_tokens": NUM_DRAFTS}
    speculative |= {"adaptive": False, "quantization": "none"}
    engine = make_engine(replace(config_of(Cell(method), folder), speculative=parse_speculative_config(speculative)))
    propose, drafter = engine.proposer.propose, engine.runner.observer  # type: ignore[attr-defined]
    lengths, drafts, logits = list[int](), list[list[int]](), list[NDArray[np.float32]]()

    def recorded(requests: Sequence[Request], quotas: Sequence[DraftQuota]) -> list[Draft]:
        found = propose(requests, quotas)
        if found and len(found[0].token_ids):
            lengths.append(requests[0].num_tokens)
            drafts.append(list(found[0].token_ids))
            logits.append(last_logits(drafter, len(found[0].token_ids)))
        return found

    engine.proposer.propose = recorded  # type: ignore[method-assign]
    request = requests_of(Cell())[0]
    text = [*request.prompt_token_ids, *run_alone(engine, [request])[request.request_id, 0].token_ids]
    ids = np.zeros([len(drafts), NUM_DRAFTS], np.int32)
    for row, draft in zip(ids, drafts):
        row[: len(draft)] = draft
    counts = np.array([len(draft) for draft in drafts])
    return {
        "text": np.array(text),
        "lengths": np.array(lengths),
        "counts": counts,
        "ids": ids,
        "logits": np.stack(logits),
    }


def target_values(folder: Path, tokens: list[int]) -> dict[str, NDArray[Any]]:
    """Return the target's last `states` and the `inputs` of its layers for all tokens."""
    cell = Cell(graphs=False)
    engine = make_engine(config_of(cell, folder))
    model = engine.runner.model  # type: ignore[attr-defined]
    recorded = WaitingStates({}, model.output)
    model.store_hidden_states(model.output[:0], taps=recorded)
    model._states = None
    request = requests_of(cell)[0]
    prefill = GenerationRequest(request.request_id, tokens, replace(request.params, max_tokens=1))
    with changed(cell):
        run_alone(engine, [prefill])
    selected_backend().synchronize()
    states = model.output[: len(tokens)].astype("float32").numpy()
    return {"states": states, "inputs": np.stack([recorded.inputs[i] for i in sorted(recorded.inputs)])}


def main() -> None:
    folder = Path(sys.argv[1])
    for method in HEADS:
        values = draft(folder, method)
        values |= target_values(folder, values["text"][:-1].tolist())
        np.savez(folder / f"{method}.npz", **values)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
