# SPDX-License-Identifier: Apache-2.0
"""The CPU as a backend."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import paddle
from numpy.typing import NDArray
from paddle import Tensor

from fastdeploy.config.cache_spec import CacheSpec
from fastdeploy.config.machine import available_memory_bytes, processor_name
from fastdeploy.ops.attention import KVCache
from fastdeploy.ops.backend import Backend, CachePages, Graph, StepFunction
from fastdeploy.ops.backends.cpu import (
    attention,
    batch_index,
    drafting,
    embedding,
    experts,
    gather,
    head_products,
    latent_attention,
    library,
    linear,
    logits,
    memory,
    norm,
    sampling,
    verify,
)
from fastdeploy.ops.backends.cpu.cache_pages import HostCachePages
from fastdeploy.ops.backends.cpu.graph import OpGraph
from fastdeploy.ops.backends.cpu.mapped_file import MappedFile
from fastdeploy.ops.block_moves import BlockRegion
from fastdeploy.ops.caches import LayerCache
from fastdeploy.ops.quantized_form import QuantizedForm

_KERNELS: dict[str, Callable[..., Any]] = {
    "allocate_kv_cache": attention.allocate_kv_cache,
    "allocate_latent_cache": latent_attention.allocate_latent_cache,
    "append_attention": attention.append_attention,
    "append_latent_attention": latent_attention.append_latent_attention,
    "draft": drafting.draft,
    "embedding": embedding.embedding,
    "experts_down": experts.experts_down,
    "experts_up": experts.experts_up,
    "fill_stage": drafting.fill_stage,
    "first_outputs": linear.first_outputs,
    "gather_rows": gather.gather_rows,
    "linear": linear.linear,
    "logprobs": sampling.logprobs,
    "norm_gelu": norm.norm_gelu,
    "pack_experts": experts.pack_experts,
    "pack_gate": experts.pack_gate,
    "pack_heads": head_products.pack_heads,
    "pack_linear": linear.pack_linear,
    "packed_embedding": embedding.packed_embedding,
    "project_heads": head_products.project_heads,
    "rms_norm": norm.rms_norm,
    "route": experts.route,
    "sample": sampling.sample,
    "scatter_logits": logits.scatter_logits,
    "scatter_rows": gather.scatter_rows,
    "shift_logits_rows": batch_index.shift_logits_rows,
    "verify_draft_tokens": verify.verify_draft_tokens,
    "virtual_padding": batch_index.virtual_padding,
}


class CpuBackend(Backend):
    """The processor that runs this process."""

    device = "cpu"
    kernels = _KERNELS
    weight_layout = "panels16-2"  # the number counts changes of the layout; packed weights are the same on all paths
    kv_layout = "packed16"  # keys in groups of 16 positions, values in pairs of positions; the same on all paths

    def load(self) -> None:
        """Load the operator library, as `Backend.load` says."""
        library.load_library()

    def capture(self, function: StepFunction, max_rows: int, max_seqs: int) -> Graph:
        """Capture the operators that function(max_rows, max_seqs) calls."""
        return OpGraph(lambda: function(max_rows, max_seqs))

    def kv_bytes_per_token(self, spec: CacheSpec) -> int:
        """Return the bytes of one token's latent row, or of its key and value, int8 scales and padding included."""
        if spec.kind == "latent":
            return spec.num_heads * spec.head_dim * attention.ITEM_BYTES[spec.dtype]
        return spec.num_heads * sum(attention.row_bytes(spec.head_dim, spec.dtype))

    def block_regions(self, cache: LayerCache, num_blocks: int) -> list[BlockRegion]:
        """Describe the tensors of a cache; those of a KVCache are [num_blocks, num_kv_heads, ...]."""
        num_heads = int(cache.key.shape[1]) if isinstance(cache, KVCache) else 1
        return [BlockRegion.of_tensor(tensor, num_blocks, num_heads) for tensor in cache.tensors]

    def row_region(self, rows: Tensor, rows_per_block: int, num_blocks: int) -> BlockRegion:
        """Describe rows in host memory."""
        block_bytes = rows_per_block * rows.shape[1] * int(rows.element_size())
        return BlockRegion(rows.data_ptr(), num_blocks, 1, block_bytes, 0)

    def packed_size(self, out_features: int, in_features: int, form: QuantizedForm | None, is_gated: bool) -> int:
        """Return the number of elements of the packed weight of a linear layer."""
        return linear.num_packed_elements(out_features, in_features, form, is_gated)

    def packed_gate_shape(self, num_experts: int, hidden_size: int) -> tuple[int, ...]:
        """Return the shape of the packed weight of a router."""
        return experts.gate_shape(num_experts, hidden_size)

    def allocate_rows(self, num_rows: int, width: int, dtype: str) -> Tensor:
        """Return untouched zeros."""
        return memory.allocate_untouched([num_rows, width], dtype)

    def cache_pages(self, regions: Sequence[BlockRegion]) -> CachePages:
        """Return what touches the pages of caches and gives them back."""
        return HostCachePages(regions)

    def map_file(self, path: Path, num_bytes: int) -> MappedFile:
        """Map a file, as `Backend.map_file` says."""
        return MappedFile(path, num_bytes)

    def host_tensor(self, array: NDArray) -> Tensor:
        """Return a tensor in the memory of the array."""
        return memory.tensor_of(array)

    def release_pages(self, address: int, num_bytes: int) -> None:
        """Give back the pages of a mapped file."""
        memory.release_range(address, num_bytes)

    def free_memory_bytes(self) -> int:
        """Return the host memory that is still available to this process."""
        return available_memory_bytes()

    def clock(self) -> float:
        """Return the processor time of the calling thread: it does not advance while the thread waits for a core."""
        return time.thread_time()

    def device_name(self) -> str:
        """Return the name of the processor."""
        return processor_name()

    def describe(self) -> dict[str, str]:
        """Return the instruction-set path and the version and source hash of the library."""
        return {"isa": library.isa(), "operator_library": f"{library.library_version()}+{library.library_hash()}"}

    def notes(self) -> list[str]:
        """Return a line if Paddle has another version than the one that the library was built with."""
        built, imported = library.paddle_version(), paddle.__version__
        if built == imported:
            return []
        todo = f"install paddlepaddle=={built}, or build them again"
        return [f"Paddle {imported} is imported, but the operators were built with Paddle {built}: {todo}"]


BACKEND = CpuBackend()
