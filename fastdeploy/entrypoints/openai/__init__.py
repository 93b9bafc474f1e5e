# SPDX-License-Identifier: Apache-2.0
"""The HTTP server that speaks the OpenAI protocol. Runs without Paddle."""
