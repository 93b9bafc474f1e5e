# SPDX-License-Identifier: Apache-2.0
"""A GPU as a backend."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import paddle
from numpy.typing import DTypeLike, NDArray
from paddle import Tensor

from fastdeploy.config.cache_spec import CacheSpec
from fastdeploy.config.model_config import ModelConfig
from fastdeploy.core.errors import ConfigError
from fastdeploy.ops.backend import Backend, DeviceOptions, Graph, StepFunction
from fastdeploy.ops.backends.cpu.memory import tensor_of
from fastdeploy.ops.backends.gpu import (
    attention,
    batch_index,
    drafting,
    embedding,
    gather,
    linear,
    logits,
    logprobs,
    norm,
    peaks,
    plugin,
    sampling,
    verify,
)
from fastdeploy.ops.backends.gpu.block_moves import StagedBlockRegions
from fastdeploy.ops.backends.gpu.graph import DEFAULT_BUCKETS, BucketedGraphs
from fastdeploy.ops.backends.gpu.library import DeviceLibrary, activate
from fastdeploy.ops.backends.gpu.memory import Mirror, mirrors
from fastdeploy.ops.block_moves import BlockRegion, BlockRegions
from fastdeploy.ops.caches import LayerCache
from fastdeploy.ops.registry import is_exact

ROW_MULTIPLE = 8  # elements of bfloat16 in the 16 bytes that a kernel reads at once
_FAMILIES = (attention, batch_index, drafting, embedding, gather, linear, logits, logprobs, norm, sampling, verify)
_KERNELS: dict[str, Callable[..., Any]] = {
    name: kernel for family in _FAMILIES for name, kernel in family.KERNELS.items()
}


class GpuBackend(Backend):
    """One GPU, which is emulated in the backend `gpu_emulated`.

    Attributes:
        library: the loaded library.
    """

    device = "gpu"
    kernels = _KERNELS
    needs_check = True
    shares_memory = False
    kv_layout = "gpu"
    max_num_seqs = attention.MAX_SEQS
    peak_bytes, peak_steps = 1 << 30, 1 << 14

    def __init__(self) -> None:
        self.library: DeviceLibrary | None = None
        self._options = DeviceOptions()
        self._place = "cpu"

    def library_path(self) -> Path:
        """Return the library to load."""
        return plugin.library_path()

    def configure(self, options: DeviceOptions) -> None:
        """Choose the GPU, and what is captured."""
        self._options = options

    def check_model(self, config: ModelConfig) -> None:
        """Check what the kernels need: bfloat16, certain head sizes, rows of whole 16 bytes, and few enough tokens."""
        if config.dtype != "bfloat16":
            raise ConfigError("dtype", f"{config.dtype} is not available on a GPU; take bfloat16")
        if config.head_dim not in attention.HEAD_DIMS:
            expected = ", ".join(map(str, attention.HEAD_DIMS))
            raise ConfigError("head_dim", f"expected {expected} on a GPU, got {config.head_dim}")
        for name in ("hidden_size", "intermediate_size"):
            self.check_width(name, getattr(config, name))
        if config.vocab_size > sampling.MAX_VOCAB_SIZE:
            limit = sampling.MAX_VOCAB_SIZE
            raise ConfigError("vocab_size", f"expected at most {limit} on a GPU, got {config.vocab_size}")

    def check_width(self, key: str, width: int) -> None:
        """Check that rows are whole 16 bytes in bfloat16."""
        if width % ROW_MULTIPLE:
            raise ConfigError(key, f"expected a multiple of {ROW_MULTIPLE} on a GPU, got {width}")

    def load(self) -> None:
        """Load the library; operators can then be called. If the device is emulated, they also take host memory."""
        if self.library is None:
            self.library = DeviceLibrary(self.library_path())
        self.library.device = self._options.index
        activate(self.library)

    def activate(self) -> None:
        """Make the device Paddle's default and let launches run in a stream of their own."""
        assert self.library is not None
        self.library.call("fd_device_set", self.library.device)
        self._place = f"{plugin.PADDLE_DEVICE}:{self.library.device}"
        paddle.set_device(self._place)
        if self.library.stream is None:
            self.library.stream = self.library.make("fd_device_stream_create")

    def capture(self, function: StepFunction, max_rows: int, max_seqs: int) -> Graph:
        """Capture what `function` launches, for each bucket of row counts at its first use.

        Nothing is captured if an operator runs its reference, because that runs on the host.
        """
        assert self.library is not None
        self.library.call("fd_device_sync")  # what Paddle has written is there, although its stream is another one
        configured = self._options.captured_rows
        buckets = () if not is_exact() else DEFAULT_BUCKETS if configured is None else configured
        return BucketedGraphs(self.library, function, max_rows, max_seqs, buckets)

    @contextmanager
    def on_host(self) -> Iterator[None]:
        """Make the host Paddle's default for new tensors, and allow the views that reading files needs."""
        before = paddle.get_device()
        paddle.set_device("cpu")
        paddle.set_flags({plugin.STRIDES: True})
        try:
            yield
        finally:
            paddle.set_flags({plugin.STRIDES: False})
            paddle.set_device(before)

    def host_tensor(self, array: NDArray) -> Tensor:
        """Return a tensor in the memory of the array."""
        return tensor_of(array)

    def place(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the host on Paddle's default device."""
        return tensor.to(self._place)

    def make_mirror(self, shape: tuple[int, ...], dtype: DTypeLike) -> Mirror | None:
        """Return memory of the host and the device."""
        assert self.library is not None
        if self.library.stream is None:
            return None  # operators are called with host memory
        mirror = Mirror(self.library, shape, dtype)
        mirrors.add(mirror)
        return mirror

    def synchronize(self) -> None:
        """Wait for everything that was put into the stream."""
        assert self.library is not None
        self.library.call("fd_device_stream_sync", self.library.stream)

    def make_synchronous(self, kernel: Callable[..., Any]) -> Callable[..., Any]:
        """Return a kernel with all mirrors copied, and all streams waited for, before and after it."""

        @wraps(kernel)
        def run(*args: Any, **kwargs: Any) -> Any:
            assert self.library is not None
            if self.library.counts is not None:  # another operator captures this one
                return kernel(*args, **kwargs)
            self.library.call("fd_device_sync")
            self._exchange(downloads=False)
            result = kernel(*args, **kwargs)
            self._exchange(downloads=True)
            return result

        return run

    def adapt_reference(self, reference: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that runs the reference on the host between waits for the device."""

        @wraps(reference)
        def run(*args: Any, **kwargs: Any) -> Any:
            self._exchange(downloads=True)
            result = reference(*args, **kwargs)
            paddle.device.synchronize(self._place)
            self._exchange(downloads=False)
            return result

        return run

    def _exchange(self, downloads: bool) -> None:
        """Copy every mirror between host and device and wait."""
        for mirror in mirrors:
            copy = mirror.download if downloads else mirror.upload
            copy(0, len(mirror.array))
        self.synchronize()

    def kv_bytes_per_token(self, spec: CacheSpec) -> int:
        """Return the bytes of one token's key and value, int8 scales included."""
        if spec.kind != "grouped":
            raise ValueError(f"kv_bytes_per_token: spec.kind: expected grouped on a GPU, got {spec.kind}")
        return spec.num_heads * sum(attention.row_bytes(spec.head_dim, spec.dtype))

    def block_regions(self, cache: LayerCache, num_blocks: int) -> list[BlockRegion]:
        """Describe the tensors of a cache, [num_blocks, num_kv_heads, ...]."""
        return [BlockRegion.of_tensor(tensor, num_blocks, int(tensor.shape[1])) for tensor in cache.tensors]

    def row_region(self, rows: Tensor, rows_per_block: int, num_blocks: int) -> BlockRegion:
        """Describe rows on the device."""
        block_bytes = rows_per_block * rows.shape[1] * int(rows.element_size())
        return BlockRegion(rows.data_ptr(), num_blocks, 1, block_bytes, 0)

    def make_block_regions(self, regions: Sequence[BlockRegion]) -> BlockRegions:
        """Return what copies blocks between the device and host memory."""
        assert self.library is not None
        return StagedBlockRegions(self.library, regions)

    def free_memory_bytes(self) -> int:
        """Return the device's free memory."""
        assert self.library is not None
        free, _ = self.library.memory()
        return free

    def total_memory_bytes(self) -> int | None:
        """Return the device's memory."""
        assert self.library is not None
        _, total = self.library.memory()
        return total

    def clock(self) -> float:
        """Return the time that passes while the thread waits too: a step ends when the device has finished it."""
        return time.perf_counter()

    def device_name(self) -> str:
        """Return the name of the card."""
        assert self.library is not None
        return self.library.properties().name.decode()

    def identify(self) -> str:
        """Return the device's name, its architecture and the CUDA version of its driver."""
        assert self.library is not None
        found = self.library.properties()
        version = f"{found.driver_version // 1000}.{found.driver_version % 1000 // 10}"
        return f"{found.name.decode()}, sm_{found.architecture}, driver for CUDA {version}"

    def measure_peaks(self) -> tuple[float, float]:
        """Measure copies of more than a cache holds, and products in registers."""
        assert self.library is not None
        copied = peaks.copied_bytes_per_second(self.library, self.peak_bytes)
        return copied, peaks.products_per_second(self.library, self.peak_steps)

    def describe(self) -> dict[str, str]:
        """Return the architecture, and the version and source hash of the library."""
        assert self.library is not None
        properties = self.library.properties()
        return {
            "isa": f"sm_{properties.architecture}",
            "operator_library": f"{self.library.version}+{self.library.source_hash}",
        }


BACKEND = GpuBackend()
