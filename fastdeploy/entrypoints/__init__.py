# SPDX-License-Identifier: Apache-2.0
"""Entry points: the offline `LLM`, the HTTP server and the command line."""
