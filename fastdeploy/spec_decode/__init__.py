# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding: proposers, drafting models and adaptive length. Verification is an operator (ops.verify)."""
