# SPDX-License-Identifier: Apache-2.0
"""Between text and token ids: tokenizer, incremental detokenisation, stop strings, requests. Paddle-free."""
