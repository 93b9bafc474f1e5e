# SPDX-License-Identifier: Apache-2.0
"""Adaptive length: how many drafts a step verifies, and when drafting is paused (docs/design/adaptive-length.md)."""
