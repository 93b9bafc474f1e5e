# SPDX-License-Identifier: Apache-2.0
"""Typed messages over ZeroMQ between the API process and the engine process, and the engine's client. Paddle-free."""
