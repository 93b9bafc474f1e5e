# SPDX-License-Identifier: Apache-2.0
"""A digest of what the selected backend computes.

The name of an instruction set does not prove that two processors compute the same bits.
"""

from __future__ import annotations

from hashlib import blake2b

from fastdeploy.ops import attention, linear, norm, registry, sampling, verify

STRIDES = {  # module, operator -> of its examples, each n-th is computed: some milliseconds in all
    (attention, "append_attention"): 8,
    (linear, "linear"): 5,
    (norm, "rms_norm"): 1,
    (sampling, "sample"): 1,
    (sampling, "logprobs"): 1,
    (verify, "verify_draft_tokens"): 1,
}


def golden_digest() -> str:
    """Compute examples of the registry with the selected backend; return a digest of the bytes of their results."""
    registry.selected_backend()
    entries, digest = registry.entries(), blake2b(digest_size=8)
    for (_, name), stride in STRIDES.items():
        for example in entries[name].examples[::stride]:
            for result in example(lambda name: entries[name].run):
                digest.update(result.numpy().tobytes())
    return digest.hexdigest()
