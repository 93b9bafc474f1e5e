# SPDX-License-Identifier: Apache-2.0
"""Quantization methods of other tools that are not supported, and what to use instead of each."""

from __future__ import annotations

from collections.abc import Mapping

PLAIN = "plain weights, which --quantization packs into fewer bits"
ANY_CODES = f"{PLAIN}, or weights in AWQ, GPTQ, compressed-tensors, GGUF, or FP8 with a scale per block of 128 x 128"
_EIGHT = "plain weights with --quantization wint8 or w8a8"
_FOUR = "plain weights with --quantization wint4 or w4a8, or weights in AWQ, GPTQ or GGUF"
_EIGHT_OR_FOUR = "plain weights with --quantization wint8 or wint4"
_FP8 = "plain weights with --quantization w8a8, or FP8 with a scale per block or output"
_MXFP4 = "a GGUF file of type MXFP4, or plain weights with --quantization wint4"

REFUSED_METHODS: Mapping[str, str] = {
    "ascend": "plain weights with --quantization w8a8",  # msmodelslim
    "aqlm": _FOUR,
    "auto-round": "the same model exported for AWQ or GPTQ, or plain weights with --quantization wint4",
    "bitnet": "a GGUF file of type TQ1_0 or TQ2_0",
    "bitsandbytes": _EIGHT_OR_FOUR,
    "eetq": _EIGHT,
    "exl2": _FOUR,
    "exl3": _FOUR,
    "experts_int8": _EIGHT,
    "fbgemm_fp8": _FP8,
    "fouroversix": _FOUR,
    "fp_quant": _FOUR,
    "gemma": PLAIN,
    "higgs": _FOUR,
    "hqq": _FOUR,
    "metal": _EIGHT_OR_FOUR,
    "modelopt": _FP8,
    "modelopt_fp4": _FOUR,
    "mxfp4": _MXFP4,
    "mxfp8": _FP8,
    "nvfp4": _FOUR,
    "petit_nvfp4": _FOUR,
    "quanto": _EIGHT_OR_FOUR,
    "quark": _EIGHT_OR_FOUR,
    "sinq": _FOUR,
    "spqr": _FOUR,
    "torchao": _EIGHT_OR_FOUR,
    "vptq": _FOUR,
}
"""quant_method of config.json, which is also the value of vLLM's flag --quantization -> what to use instead."""


def instead_of(method: str) -> str:
    """Return what to use instead of a method that is not supported."""
    return REFUSED_METHODS.get(method.lower(), ANY_CODES)
