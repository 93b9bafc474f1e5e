# SPDX-License-Identifier: Apache-2.0
"""How the weights and the rows of linear layers are quantized, as custom_ops/common/quant.h defines it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Protocol

QUANTIZATIONS = ("wint8", "wint4", "w8a8", "w4a8")  # the order of Quantization in custom_ops/common/quant.h
NO_QUANTIZATION = "none"
GROUP_SIZES = (0, 32, 64, 128)
PANEL = 16  # outputs of a panel of packed weights


class QuantizedWeight(Protocol):
    """A packed weight that may be quantized; the attributes are those of QuantizedForm, or NO_QUANTIZATION."""

    @property
    def quantization(self) -> str: ...

    @property
    def group_size(self) -> int: ...

    @property
    def has_minimum(self) -> bool: ...


@dataclass(frozen=True)
class QuantizedForm:
    """How a weight is stored and how the rows that it multiplies are quantized.

    Attributes:
        quantization: one of QUANTIZATIONS, which tells the bits of weights (wint8 and w8a8: 8, wint4 and w4a8: 4) and
            of rows (wint8 and wint4: 16, w8a8 and w4a8: 8).
        group_size: inputs that share a scale: 32, 64 or 128; or 0, where an output has one scale.
        has_minimum: a weight is code * scale + minimum, with codes from 0 on, instead of code * scale.
    """

    quantization: str
    group_size: int = 0
    has_minimum: bool = False

    def __post_init__(self) -> None:
        if self.quantization not in QUANTIZATIONS or self.group_size not in GROUP_SIZES:
            raise ValueError(f"unknown form: {self}")

    @property
    def weight_bits(self) -> int:
        """Return the bits of a weight's code."""
        return 4 if self.quantization in ("wint4", "w4a8") else 8

    @property
    def row_bits(self) -> int:
        """Return the bits of an input's code."""
        return 16 if self.quantization in ("wint8", "wint4") else 8

    @property
    def has_scales(self) -> bool:
        """Return whether groups have fp16 scales; otherwise each output has an fp32 factor only."""
        return self.weight_bits == 4 or self.group_size != 0 or self.has_minimum

    def num_groups(self, in_features: int) -> int:
        """Return the number of scales of an output."""
        if not self.has_scales:
            return 0
        return -(-in_features // self.group_size) if self.group_size else 1

    def header_bytes(self, in_features: int) -> int:
        """Return the bytes before the codes of a panel: factors, scales and minimums, each filled up to 64."""
        scales = -(-self.num_groups(in_features) * 2 * PANEL // 64) * 64
        return 4 * PANEL + scales * (2 if self.has_minimum else 1)

    def panel_bytes(self, in_features: int) -> int:
        """Return the bytes of a panel: its header, then the codes of whole pieces of 32 inputs."""
        return self.header_bytes(in_features) + -(-in_features // 32) * 64 * self.weight_bits

    def as_list(self) -> list[int]:
        """Return the form as the native libraries take it."""
        return [QUANTIZATIONS.index(self.quantization), self.group_size, int(self.has_minimum)]


FORMS = {
    "wint8": QuantizedForm("wint8"),
    "wint4": QuantizedForm("wint4", 32),
    "wint4_min": QuantizedForm("wint4", 32, has_minimum=True),
    "w8a8": QuantizedForm("w8a8", 32),
    "w4a8": QuantizedForm("w4a8", 32),
    "w4a8_min": QuantizedForm("w4a8", 32, has_minimum=True),
}
"""Name of a format -> what `pack_linear` makes of a bf16 weight."""


def fields_of(form: QuantizedForm | None) -> dict[str, str | int | bool]:
    """Return the fields that say the form of a packed weight; None for one that is not quantized."""
    if form is None:
        return {"quantization": NO_QUANTIZATION, "group_size": 0, "has_minimum": False}
    return asdict(form)


def form_of(weight: QuantizedWeight) -> QuantizedForm | None:
    """Return the form of a packed weight, or None if it is not quantized."""
    if weight.quantization == NO_QUANTIZATION:
        return None
    return QuantizedForm(weight.quantization, weight.group_size, weight.has_minimum)
