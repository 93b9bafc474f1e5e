# SPDX-License-Identifier: Apache-2.0
"""Layers of a decoder: weights, and calls of operators that write to given buffers."""
