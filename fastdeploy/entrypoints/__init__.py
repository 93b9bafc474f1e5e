# SPDX-License-Identifier: Apache-2.0
"""Ways in: the offline `LLM`, the HTTP server, the command line."""
