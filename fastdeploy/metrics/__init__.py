# SPDX-License-Identifier: Apache-2.0
"""Prometheus metrics, records of requests and logging. Nothing here imports Paddle."""
