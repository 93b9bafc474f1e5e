# SPDX-License-Identifier: Apache-2.0
"""The types of tensors in GGUF files: how many values a block has, and how many bytes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GGMLType:
    """A type of tensors.

    Attributes:
        name: as ggml spells it: F32, Q4_K, ...
        type_id: its number in files.
        block_values: consecutive values of a row that are stored together.
        block_bytes: bytes of such a block.
    """

    name: str
    type_id: int
    block_values: int
    block_bytes: int

    def row_bytes(self, num_values: int) -> int:
        """Return the bytes of a row, whose values are whole blocks."""
        return num_values // self.block_values * self.block_bytes


GGML_TYPES = {
    kind.name: kind
    for kind in (
        GGMLType("F32", 0, 1, 4),
        GGMLType("F16", 1, 1, 2),
        GGMLType("Q4_0", 2, 32, 18),
        GGMLType("Q4_1", 3, 32, 20),
        GGMLType("Q5_0", 6, 32, 22),
        GGMLType("Q5_1", 7, 32, 24),
        GGMLType("Q8_0", 8, 32, 34),
        GGMLType("Q2_K", 10, 256, 84),
        GGMLType("Q3_K", 11, 256, 110),
        GGMLType("Q4_K", 12, 256, 144),
        GGMLType("Q5_K", 13, 256, 176),
        GGMLType("Q6_K", 14, 256, 210),
        GGMLType("IQ2_XXS", 16, 256, 66),
        GGMLType("IQ2_XS", 17, 256, 74),
        GGMLType("IQ3_XXS", 18, 256, 98),
        GGMLType("IQ1_S", 19, 256, 50),
        GGMLType("IQ4_NL", 20, 32, 18),
        GGMLType("IQ3_S", 21, 256, 110),
        GGMLType("IQ2_S", 22, 256, 82),
        GGMLType("IQ4_XS", 23, 256, 136),
        GGMLType("F64", 28, 1, 8),
        GGMLType("IQ1_M", 29, 256, 56),
        GGMLType("BF16", 30, 1, 2),
        GGMLType("TQ1_0", 34, 256, 54),
        GGMLType("TQ2_0", 35, 256, 66),
        GGMLType("MXFP4", 39, 32, 17),
        GGMLType("NVFP4", 40, 64, 36),
    )
}
"""The types that weights are stored in, by name; ggml's other types are for activations, integers or experiments."""

TYPES_BY_ID = {kind.type_id: kind for kind in GGML_TYPES.values()}
PLAIN_TYPES = ("F32", "F16", "BF16", "F64")  # are not quantized
