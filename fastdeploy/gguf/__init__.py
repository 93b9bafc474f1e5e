# SPDX-License-Identifier: Apache-2.0
"""GGUF files: what they hold, and the files of a folder in Hugging Face format that follow from their metadata."""
