# SPDX-License-Identifier: Apache-2.0
"""Proposers, one file per speculation method, and their registry."""
