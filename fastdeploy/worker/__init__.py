# SPDX-License-Identifier: Apache-2.0
"""Runs a step's plan on the model: the only place where requests become tensors."""
