# SPDX-License-Identifier: Apache-2.0
"""The GPU that any machine has: the kernels of `gpu`, executed on the CPU by the emulator (docs/design/gpu.md)."""
