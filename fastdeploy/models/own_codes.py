# SPDX-License-Identifier: Apache-2.0
"""Which codes of a checkpoint are kept, and the form in which a layer of them is packed.

A layer that is packed from several weights takes the widest of their forms: codes of four bits are exact in eight, and
a missing minimum is 0.
"""

from __future__ import annotations

from collections.abc import Sequence

from fastdeploy.config.quantization import GGUF, OWN_FORMATS
from fastdeploy.ops.quantized_form import FORMS, NO_QUANTIZATION, QUANTIZATIONS, QuantizedForm

Form = QuantizedForm | None
BY_BITS = {(QuantizedForm(name).weight_bits, QuantizedForm(name).row_bits): name for name in QUANTIZATIONS}
"""Bits of codes and of inputs -> the name of a quantization."""


def keeps_codes(stored: Sequence[Form], wanted: str) -> bool:
    """Return whether a layer keeps the codes of the weights from which it is packed.

    Args:
        stored: form of each weight, None for one without codes.
        wanted: the layer's format: one of OWN_FORMATS keeps all codes, another one those that it has enough bits for.
    """
    if wanted == NO_QUANTIZATION:
        return False
    most = max(form.weight_bits if form is not None else 16 for form in stored)
    return most <= (8 if wanted in OWN_FORMATS else FORMS[wanted].weight_bits)


def packed_form(stored: Sequence[Form], wanted: str) -> Form:
    """Return the form in which a layer is packed, None if it is not quantized.

    Codes that are kept have their own bits. Inputs have those that the checkpoint intends with one of OWN_FORMATS, else
    those of the format.
    """
    if not keeps_codes(stored, wanted):
        return FORMS.get(wanted)
    forms = [form for form in stored if form is not None]
    row_bits = FORMS[wanted].row_bits if wanted in FORMS else max(form.row_bits for form in forms)
    return QuantizedForm(
        BY_BITS[max(form.weight_bits for form in forms), row_bits],
        min((form.group_size for form in forms if form.group_size), default=0),
        any(form.has_minimum for form in forms),
    )


def table_format(stored: Form, head: str) -> str:
    """Return the format of an embedding, given that of the head.

    It is that of the head if that one keeps the embedding's codes. An embedding is never quantized anew, since few of
    its rows are read in a step.
    """
    if stored is None or head == NO_QUANTIZATION:
        return NO_QUANTIZATION
    return head if keeps_codes([stored], head) else GGUF


def packing_format(stored: Sequence[Form], wanted: str) -> str:
    """Return the format with which `pack_linear` packs a layer, from codes if they are kept."""
    if keeps_codes(stored, wanted):
        form = packed_form(stored, wanted)
        assert form is not None, "codes have a form"
        return form.quantization
    return NO_QUANTIZATION if wanted in OWN_FORMATS else wanted
