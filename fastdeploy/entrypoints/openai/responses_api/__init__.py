# SPDX-License-Identifier: Apache-2.0
"""OpenAI's /v1/responses, without storage, over a turn of a chat."""
