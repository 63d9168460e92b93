# SPDX-License-Identifier: Apache-2.0
"""The gRPC controller of p4reduce: jobs, slot pools, liveness."""
