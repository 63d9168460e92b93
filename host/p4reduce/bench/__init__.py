# SPDX-License-Identifier: Apache-2.0
"""`p4reduce bench`: the switch path and its baselines, measured side by side on one switch (docs/bench.md)."""
