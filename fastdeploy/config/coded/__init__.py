# SPDX-License-Identifier: Apache-2.0
"""What config.json says about weights that are stored as codes, for each method of quantization."""
