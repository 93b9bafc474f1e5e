# SPDX-License-Identifier: Apache-2.0
"""Write the digests that `fastdeploy check-device` compares with (fastdeploy/ops/device_check/golden.json).

    python -m scripts.make_golden_vectors

They are computed by the emulator. Run it after examples of the registry, or kernels whose bits are spelled out, have
changed on purpose.
"""

from __future__ import annotations

import json

import fastdeploy.ops.device_check.runner  # noqa: F401  # registers all operators
from fastdeploy.ops import registry
from fastdeploy.ops.backends.gpu import plugin
from fastdeploy.ops.backends.gpu.backend import GpuBackend
from fastdeploy.ops.backends.gpu.library import DeviceLibrary, activate
from fastdeploy.ops.device_check.examples import Products, compute, digest, taken_by
from fastdeploy.ops.device_check.golden import FILE, INPUTS, inputs_digest


def compute_digests() -> dict[str, dict[str, str]]:
    """Return operator -> number of the example -> digest, of examples without bfloat16 products."""
    activate(DeviceLibrary(plugin.build_emulated(has_checks=False)))
    digests: dict[str, dict[str, str]] = {}
    for name, entry in registry.entries().items():
        for index in taken_by(GpuBackend.device, name) if name in GpuBackend.kernels else []:
            products = Products(GpuBackend.kernels.__getitem__)
            results = compute(entry.examples[index], products)
            if not products.are_used:
                digests.setdefault(name, {})[str(index)] = digest(results)
    return digests


def main() -> None:
    """Write the file."""
    text = json.dumps({INPUTS: inputs_digest(), "operators": compute_digests()}, indent=1)
    FILE.write_text(text + "\n")


if __name__ == "__main__":
    main()
