# SPDX-License-Identifier: Apache-2.0
"""Write tests/golden/folders.npz: what `transformers` computes for the folders of tests/models/seeded_folders.py.

Run in an environment with torch and transformers 5 (neither is needed to run the tests):

    python scripts/make_golden_folders.py

For each folder that is read: log-probabilities of some rows in float32, and the dtype in which transformers would run.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.models.seeded_folders import FOLDERS, ROWS, TOKENS  # noqa: E402


@torch.no_grad()
def main() -> None:
    found: dict[str, np.ndarray] = {}
    with tempfile.TemporaryDirectory() as temporary:
        for index, folder in enumerate(FOLDERS):
            if folder.refused:
                continue
            path = Path(temporary) / str(index)
            folder.make(path)
            own = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
            model, report = AutoModelForCausalLM.from_pretrained(
                path, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
            )
            assert not report["missing_keys"] and not report["mismatched_keys"], (folder.name, report)
            logits = model(torch.tensor([TOKENS]), use_cache=False).logits[0].float()
            found[f"{folder.name}/logprobs"] = logits.log_softmax(-1)[list(ROWS)].numpy()
            found[f"{folder.name}/dtype"] = np.array(str(own.dtype).removeprefix("torch."))
    np.savez_compressed(ROOT / "tests" / "golden" / "folders.npz", **found)


if __name__ == "__main__":
    main()
