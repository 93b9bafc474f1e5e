# SPDX-License-Identifier: Apache-2.0
"""Transports that bring the blocks of another node within reach of this node's engine."""
