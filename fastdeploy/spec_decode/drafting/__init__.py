# SPDX-License-Identifier: Apache-2.0
"""Runners of drafting models: draft models and layers for multi-token prediction."""
