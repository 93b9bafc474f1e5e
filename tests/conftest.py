# SPDX-License-Identifier: Apache-2.0
"""Property tests try the same examples in every run, so that a commit passes or fails for good."""

from hypothesis import settings

settings.register_profile("same-examples", derandomize=True)
settings.load_profile("same-examples")
