# SPDX-License-Identifier: Apache-2.0
"""The torch DistributedDataParallel communication hook. The only place that imports torch."""
