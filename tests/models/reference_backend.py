# SPDX-License-Identifier: Apache-2.0
"""A backend without kernels: every operator runs its Paddle reference, on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fastdeploy.config.cache_spec import CacheSpec
from fastdeploy.ops.backend import Backend
from fastdeploy.ops.registry import selected_backend, use_backend


class ReferenceBackend(Backend):
    """Runs the reference of every operator."""

    device = "cpu"

    def load(self) -> None:
        """Do nothing: there is no library."""

    def kv_bytes_per_token(self, spec: CacheSpec) -> int:
        """Return the bytes of fp32 keys and values."""
        return 8 * spec.num_heads * spec.head_dim

    def free_memory_bytes(self) -> int:
        """Return 1 GiB."""
        return 1 << 30

    def clock(self) -> float:
        """Return 0."""
        return 0.0

    def device_name(self) -> str:
        """Return a fixed name."""
        return "none"

    def describe(self) -> dict[str, str]:
        """Return fixed names."""
        return {"isa": "reference", "operator_library": "none"}


@contextmanager
def reference_backend() -> Iterator[None]:
    """Run references instead of kernels."""
    before = selected_backend()
    use_backend(ReferenceBackend())
    try:
        yield
    finally:
        use_backend(before)
