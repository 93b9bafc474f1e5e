# SPDX-License-Identifier: Apache-2.0
"""Whether a device computes what its kernels say: `fastdeploy check-device`, in short form at the first start.

`examples` runs those of the registry, `rows` compares calls of many rows with calls of one, `golden` knows digests of
results, `runner` does all of it, `bench` measures times, and `first_start` keeps what was found.
"""
