# SPDX-License-Identifier: Apache-2.0
"""Requests across several nodes: queues over Redis, hand-overs, and what happens when a process dies.

Nothing here imports Paddle.
"""
