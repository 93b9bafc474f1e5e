# SPDX-License-Identifier: Apache-2.0
"""Prometheus metrics and the record of each request. Paddle-free."""
