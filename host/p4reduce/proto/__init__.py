# SPDX-License-Identifier: Apache-2.0
"""Generated code of the controller service."""
