# SPDX-License-Identifier: Apache-2.0
"""What runs on a device: `python -m fastdeploy.ops.report gpu` prints one JSON object.

It is a command, because who asks should not import Paddle, and because a library may not suit this machine.
"""

from __future__ import annotations

import json
import logging
import pkgutil
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from fastdeploy.core.errors import ConfigError, DeviceError
from fastdeploy.ops.startup import prepare


def main(device: str) -> int:
    """Print the report, or why there is none; return the exit status."""
    logging.disable(logging.WARNING)
    try:
        print(json.dumps(report(device)))
    except (ConfigError, DeviceError, RuntimeError) as error:
        print(json.dumps({"error": str(error)}))
        return 1
    return 0


def report(device: str) -> dict[str, Any]:
    """Return backend, name of the device, architecture, library, and the operators with and without a kernel.

    Those without either run their reference or are missing: models that need a missing operator are refused.

    Raises:
        ConfigError, DeviceError, OperatorLibraryError: the device cannot be used.
    """
    prepare(device)
    register_all()
    from fastdeploy.ops.registry import entries, missing_kernels, reference_names, select_backend

    backend = select_backend(device)
    references = reference_names()
    without_kernel = missing_kernels(sorted(entries()))
    return {
        "backend": backend.device,
        "device_name": backend.device_name(),
        **backend.describe(),
        "native_operators": [name for name in sorted(entries()) if name not in {*references, *without_kernel}],
        "reference_operators": references,
        "missing_operators": [name for name in without_kernel if name not in references],
    }


def register_all() -> None:
    """Import every operator family, so that the registry is complete."""
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        if not module.ispkg and not module.name.startswith("_") and module.name != Path(__file__).stem:
            import_module(f"fastdeploy.ops.{module.name}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
