# SPDX-License-Identifier: Apache-2.0
"""Layers of a decoder: they hold weights and call operators that write into given buffers."""
