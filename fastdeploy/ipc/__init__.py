# SPDX-License-Identifier: Apache-2.0
"""Typed messages over ZeroMQ between the API processes and the engine process, and the engine's client.

Nothing here imports Paddle.
"""
