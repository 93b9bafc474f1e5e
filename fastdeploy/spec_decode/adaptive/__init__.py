# SPDX-License-Identifier: Apache-2.0
"""Adaptive length: how many draft tokens each request gets in a step, and when drafting is paused."""
