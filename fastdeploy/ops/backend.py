# SPDX-License-Identifier: Apache-2.0
"""What every device provides. All code outside `fastdeploy.ops.backends` uses a device through this class only.

A backend is a package `fastdeploy.ops.backends.<device>` whose module `backend` defines `BACKEND`, an instance of a
subclass of `Backend`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

import paddle
from numpy.typing import DTypeLike, NDArray

from fastdeploy.ops.block_moves import BlockRegion, BlockRegions
from fastdeploy.ops.quantized_form import QuantizedForm

if TYPE_CHECKING:
    from paddle import Tensor

    from fastdeploy.config.cache_spec import CacheSpec
    from fastdeploy.config.model_config import ModelConfig
    from fastdeploy.ops.caches import LayerCache

# function(num_rows, num_seqs) calls operators for the first rows and sequences of buffers with fixed addresses.
StepFunction = Callable[[int, int], None]


class Graph(Protocol):
    """Operators that can be executed again for another number of rows and sequences."""

    @property
    def replay(self) -> StepFunction:
        """Execute the operators for the first num_rows rows and num_seqs sequences."""


class Mirror(Protocol):
    """An array of the host and a tensor of the same shape on the device."""

    @property
    def array(self) -> NDArray:
        """The host's side."""

    @property
    def tensor(self) -> Tensor:
        """The device's side."""

    def upload(self, begin: int, end: int) -> None:
        """Copy rows [begin, end) to the device, before the launches that follow."""

    def download(self, begin: int, end: int) -> None:
        """Copy rows [begin, end) to the host; they are there after `Backend.synchronize`."""


class MappedFile(Protocol):
    """A file that is mapped for reading, so that processes share its pages."""

    def tensor(self, dtype: str, shape: Sequence[int], offset: int) -> Tensor:
        """Return a tensor whose memory is the mapped file.

        Args:
            offset: of its first byte, a multiple of the size of an element.
        """


class CachePages(Protocol):
    """The pages of the blocks of all caches, which take memory when they are first written."""

    def touch(self, first: int, last: int) -> None:
        """Write zeros to blocks [first, last), of which there is at least one, and which nobody has written to."""

    def release(self) -> None:
        """Give back all pages of all blocks, which then hold zeros again."""

    def num_bytes(self, first: int, last: int) -> int:
        """Return the memory that touching blocks [first, last) takes at most, if all before them have been touched."""


@dataclass(frozen=True)
class DeviceOptions:
    """How a device is used.

    Attributes:
        index: which of the devices that the process sees.
        captured_rows: numbers of rows, ascending, for which steps are captured; None: those of the backend.
    """

    index: int = 0
    captured_rows: tuple[int, ...] | None = None


@dataclass(frozen=True)
class UncapturedGraph:
    """A function that is called each time, for backends that cannot capture operators."""

    replay: StepFunction


class Backend(ABC):
    """A device and its native kernels.

    Attributes:
        device: the name of the device in Paddle and in `--device`, such as "cpu".
        kernels: operator name -> native kernel, which takes the arguments of the operator's reference. An operator
            that is missing here runs its reference.
        needs_check: whether operators are checked on the device before the first engine uses them.
        is_emulated: whether the device is executed by the CPU, so that times say nothing.
        shares_memory: whether operators use the host's memory, so that nothing is uploaded and downloaded.
        max_num_seqs: most requests in a step.
        kv_layout: names how keys and values lie in a block; blocks move between engines of equal names.
        weight_layout: names how packed weights lie in memory, which another name says of every other layout; empty if
            they cannot be mapped from files.
    """

    device: str
    kernels: Mapping[str, Callable[..., Any]] = MappingProxyType({})
    needs_check: bool = False
    is_emulated: bool = False
    shares_memory: bool = True
    max_num_seqs: int = 1 << 16
    kv_layout: str = ""
    weight_layout: str = ""

    @abstractmethod
    def load(self) -> None:
        """Load the native library; later calls do nothing.

        Raises:
            OperatorLibraryError: the library is missing, does not match the package, or cannot run as configured.
        """

    def configure(self, options: DeviceOptions) -> None:  # noqa: B027  # the CPU has no options
        """Set how the device is used; called before `load`."""

    def check_model(self, config: ModelConfig) -> None:  # noqa: B027  # a backend may take every model
        """Check that the kernels take the sizes and the dtype of a model.

        Raises:
            ConfigError: they do not; names the key of config.json, or the flag.
        """

    def check_width(self, key: str, width: int) -> None:  # noqa: B027  # a backend may take every width
        """Check that the kernels take rows of this width.

        Raises:
            ConfigError: they do not; names `key`, which is that of config.json.
        """

    def activate(self) -> None:
        """Use the device from now on: it is Paddle's default for new tensors."""
        paddle.set_device(self.device)

    @contextmanager
    def on_host(self) -> Iterator[None]:
        """Make the host Paddle's default for new tensors, for reading and packing weights."""
        yield

    def place(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the host on the device."""
        return tensor

    def host_tensor(self, array: NDArray) -> Tensor:
        """Return a contiguous array of the host as a tensor of the host, without a copy if the backend can.

        Args:
            array: uint16 for bfloat16. Nothing writes to it afterwards, and it may be read-only.
        """
        return paddle.to_tensor(array)

    def release_pages(self, address: int, num_bytes: int) -> None:  # noqa: B027  # only saves memory
        """Give back the host's memory of a tensor in a mapped file; when it is used again, it is read again."""

    def make_mirror(self, shape: tuple[int, ...], dtype: DTypeLike) -> Mirror | None:
        """Return memory of the host and the device for a HostBuffer; None if they share their memory."""
        return None

    def synchronize(self) -> None:  # noqa: B027  # a device that does everything at once has nothing to wait for
        """Wait until the device has done everything that it was asked for."""

    def make_synchronous(self, kernel: Callable[..., Any]) -> Callable[..., Any]:
        """Return a kernel that takes what the host has written to its buffers, and is finished when it returns.

        What it wrote to buffers of the host is there then. For checks; a step uploads and downloads what it needs.
        """
        return kernel

    def adapt_reference(self, reference: Callable[..., Any]) -> Callable[..., Any]:
        """Return what runs in the place of a missing kernel."""
        return reference

    def capture(self, function: StepFunction, max_rows: int, max_seqs: int) -> Graph:
        """Capture the operators that `function` calls.

        Args:
            function: called once, with (max_rows, max_seqs), by a backend that captures; it must not read results.
            max_rows, max_seqs: capacity of the buffers.
        """
        return UncapturedGraph(function)

    @abstractmethod
    def kv_bytes_per_token(self, spec: CacheSpec) -> int:
        """Return the bytes of one token in the cache of one layer.

        Raises:
            ValueError: the backend has no cache of this kind.
        """

    def block_regions(self, cache: LayerCache, num_blocks: int) -> list[BlockRegion]:
        """Describe the first blocks of a cache for copies to shared memory.

        KV head h has checksum h; a latent row is one head.

        Raises:
            NotImplementedError: the blocks of this backend do not move between engines.
        """
        raise NotImplementedError(f"backend {self.device}: KV blocks do not move between engines")

    def make_block_regions(self, regions: Sequence[BlockRegion]) -> BlockRegions:
        """Return what copies the blocks of these regions, of which there is at least one."""
        return BlockRegions(regions)

    def row_region(self, rows: Tensor, rows_per_block: int, num_blocks: int) -> BlockRegion:
        """Describe a tensor [num_rows, width] whose first rows belong to the slots of a cache, in one piece per block.

        It has one checksum.

        Raises:
            NotImplementedError: as `block_regions`.
        """
        raise NotImplementedError(f"backend {self.device}: KV blocks do not move between engines")

    def packed_size(self, out_features: int, in_features: int, form: QuantizedForm | None, is_gated: bool) -> int:
        """Return the number of elements of the packed weight of a linear layer; bytes if it is quantized.

        Raises:
            NotImplementedError: weights are not mapped from files.
        """
        raise NotImplementedError(f"backend {self.device}: weights are not mapped from files")

    def packed_gate_shape(self, num_experts: int, hidden_size: int) -> tuple[int, ...]:
        """Return the shape of the packed weight of a router.

        Raises:
            NotImplementedError: weights are not mapped from files.
        """
        raise NotImplementedError(f"backend {self.device}: weights are not mapped from files")

    def allocate_rows(self, num_rows: int, width: int, dtype: str) -> Tensor:
        """Return zeros for rows that belong to the slots of a cache; in the host's memory they are untouched."""
        rows: Tensor = paddle.zeros([num_rows, width], dtype)
        return rows

    def cache_pages(self, regions: Sequence[BlockRegion]) -> CachePages | None:
        """Return what touches the pages of caches and gives them back; None if allocating caches takes their memory."""
        return None

    def map_file(self, path: Path, num_bytes: int) -> MappedFile:
        """Map the first num_bytes bytes of a file of packed weights, of which there is at least one.

        Raises:
            NotImplementedError: weights are not mapped from files.
        """
        raise NotImplementedError(f"backend {self.device}: weights are not mapped from files")

    @abstractmethod
    def free_memory_bytes(self) -> int:
        """Return the memory that weights and caches can still take."""

    def total_memory_bytes(self) -> int | None:
        """Return the memory of a device that has its own; None if it uses the host's."""
        return None

    @abstractmethod
    def clock(self) -> float:
        """Return a time in seconds that advances while the calling thread computes, for measuring steps."""

    def identify(self) -> str:
        """Return the name of the device and of what drives it; results that were checked on one hold on its like."""
        return self.device

    def measure_peaks(self) -> tuple[float, float]:
        """Return the bytes that copies read and write, and the operations on bfloat16 matrices, per second.

        Raises:
            NotImplementedError: the backend has no kernels for it.
        """
        raise NotImplementedError(f"backend {self.device}: no kernels that measure peaks")

    @abstractmethod
    def device_name(self) -> str:
        """Return the name of the processor or card."""

    @abstractmethod
    def describe(self) -> dict[str, str]:
        """Return what decides the bits of a result: `isa`, the instruction set, and `operator_library`, its build."""

    def notes(self) -> list[str]:
        """Return lines for the start of an engine about an installation that may not do what it should."""
        return []
