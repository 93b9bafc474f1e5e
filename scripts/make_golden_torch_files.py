# SPDX-License-Identifier: Apache-2.0
"""Write tests/golden/torch_files/: small files of torch.save, and values.json, what torch reads from them.

Run in an environment with torch (it is not needed to run the tests):

    python scripts/make_golden_torch_files.py

protocol_2.bin  the state of a module, and tensors of other dtypes, one of them a parameter and two not contiguous
protocol_4.pt   two tensors of that, pickled with the newer opcodes
legacy.bin      one tensor in the format before PyTorch 1.6

values.json has, by file and name, `dtype`, and the `values` as nested lists.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

FOLDER = Path(__file__).resolve().parent.parent / "tests" / "golden" / "torch_files"


def make_tensors() -> dict[str, torch.Tensor]:
    """Return the state of a linear layer, an OrderedDict with metadata, and further tensors."""
    head = nn.Module()
    head.fc = nn.Linear(2, 3)
    head.fc.weight.data = torch.arange(6.0).reshape(3, 2)
    head.fc.bias.data = torch.tensor([0.5, -1.0, 2.0])
    tensors = head.state_dict()
    tensors["bfloat16"] = torch.tensor([[1.5, -2.0]], dtype=torch.bfloat16)
    tensors["half"] = torch.tensor([0.25, 3.0], dtype=torch.float16)
    tensors["double"] = torch.tensor(690.5, dtype=torch.float64)
    tensors["d2t"] = torch.tensor([0, 5, 2**40])
    tensors["t2d"] = torch.tensor([True, False])
    tensors["parameter"] = nn.Parameter(torch.tensor([4.0]))
    numbers = torch.arange(24, dtype=torch.int32).reshape(2, 3, 4)
    tensors["transposed"] = numbers.permute(2, 0, 1)
    tensors["sliced"] = numbers[:, 1:, ::2]
    return tensors


def main() -> None:
    """Write the files and read them again."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    tensors = make_tensors()
    torch.save(tensors, FOLDER / "protocol_2.bin")
    torch.save({name: tensors[name] for name in ("fc.weight", "half")}, FOLDER / "protocol_4.pt", pickle_protocol=4)
    torch.save({"half": tensors["half"]}, FOLDER / "legacy.bin", _use_new_zipfile_serialization=False)
    values: dict[str, Any] = {}
    for name in ("protocol_2.bin", "protocol_4.pt"):
        read = torch.load(FOLDER / name, weights_only=False)  # the files that were just written
        values[name] = {
            key: {"dtype": str(tensor.dtype).removeprefix("torch."), "values": tensor.tolist()}
            for key, tensor in read.items()
        }
    (FOLDER / "values.json").write_text(json.dumps(values, indent=1) + "\n")


if __name__ == "__main__":
    main()
