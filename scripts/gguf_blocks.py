# SPDX-License-Identifier: Apache-2.0
"""Random blocks of those types of GGUF files to which the package `gguf` cannot quantize, for make_gguf_files.py.

Codes and inner scales are random bits; the scale of a block is such that its values have a given size.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Layout:
    """Where a block has its scale.

    Attributes:
        scale: byte at which the fp16 scale begins; negative from the end.
        minimum: the same for the scale of the minimums; None if the type has none.
        mean: what a code times its inner scale is on average, divided by the mean of an inner minimum, so that the
            minimum takes the mean away.
    """

    scale: int
    minimum: int | None = None
    mean: float = 0.0


LAYOUTS = {
    "Q2_K": Layout(-4, -2, 1.5),
    "Q3_K": Layout(-2),
    "Q4_K": Layout(0, 2, 7.5),
    "Q5_K": Layout(0, 2, 15.5),
    "Q6_K": Layout(-2),
    **dict.fromkeys(("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S", "IQ4_NL", "IQ4_XS"), Layout(0)),
    "TQ1_0": Layout(-2),
    "TQ2_0": Layout(-2),
}


def _write_fp16(blocks: Bytes, at: int, value: float) -> None:
    begin = at % blocks.shape[1]
    blocks[:, begin : begin + 2] = np.frombuffer(np.float16(value).tobytes(), np.uint8)


def _write_scale(blocks: Bytes, name: str, value: float) -> None:
    """Write one scale, rounded as the type stores it, to all blocks."""
    if name in LAYOUTS:
        layout = LAYOUTS[name]
        _write_fp16(blocks, layout.scale, value)
        if layout.minimum is not None:
            _write_fp16(blocks, layout.minimum, value * layout.mean)
    elif name == "IQ1_M":  # the fp16 scale lies in the highest four bits of four inner scales
        bits = int(np.float16(value).view(np.uint16))
        for index in range(4):
            high = blocks[:, 49 + 2 * index]
            high[:] = (high & 0x0F) | ((bits >> (4 * index) & 0x0F) << 4)
    else:
        assert name == "NVFP4", name
        blocks[:, :4] = np.uint8(8 * (7 + round(np.log2(value))) + 8)  # E4M3 without a sign, 2^round(log2(value))


def random_blocks(shape: tuple[int, ...], kind: GGMLQuantizationType, rms: float, rng: np.random.Generator) -> Bytes:
    """Return rows of blocks as the file has them; `rms` is about that of the values."""
    values, size = GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (int(np.prod(shape)) // values, size), dtype=np.uint8)
    if kind.name == "TQ2_0":  # the fourth code is not used
        blocks[:, :64] = _codes_below_three(blocks[:, :64])
    _write_scale(blocks, kind.name, 1.0)
    unit = float(np.sqrt(np.mean(np.square(quants.dequantize(blocks, kind)))))
    _write_scale(blocks, kind.name, rms / unit)
    return blocks.reshape(*shape[:-1], shape[-1] // values * size)


def _codes_below_three(packed: Bytes) -> Bytes:
    codes = [(packed >> shift & 3) % 3 for shift in (0, 2, 4, 6)]
    return np.asarray(sum(code << shift for code, shift in zip(codes, (0, 2, 4, 6), strict=True)), np.uint8)


def encode(values: NDArray[np.float32], kind: GGMLQuantizationType, rng: np.random.Generator) -> Bytes:
    """Return values in a type: quantized where `gguf` can, else random blocks of about the same size."""
    if kind.name in LAYOUTS or kind.name in ("IQ1_M", "NVFP4"):
        rms = float(np.sqrt(np.mean(np.square(values))))
        return random_blocks(values.shape, kind, rms, rng)
    return np.asarray(quants.quantize(values, kind))
