# SPDX-License-Identifier: Apache-2.0
"""Layouts of safetensors files that store weights as codes, one module for each."""
