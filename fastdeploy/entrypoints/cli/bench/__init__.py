# SPDX-License-Identifier: Apache-2.0
"""`fastdeploy bench`: measurements of a server (serve) and of the engine alone (latency, throughput)."""
