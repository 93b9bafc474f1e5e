# SPDX-License-Identifier: Apache-2.0
"""From the name of a model to its directory: local, part of the package, or downloaded from a hub."""
