# SPDX-License-Identifier: Apache-2.0
"""Kernels of the operators in `fastdeploy.ops.sampling`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

KERNELS: dict[str, Callable[..., Any]] = {}
