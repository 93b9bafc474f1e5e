# SPDX-License-Identifier: Apache-2.0
"""Blocks of the key/value cache: who holds which, and which can be found again by their tokens."""
