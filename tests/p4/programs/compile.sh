#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Compiles the programs of this folder. Needs p4c-bm2-ss; the results are committed, so the tests do not.
set -euo pipefail
cd "$(dirname "$0")"
for source in *.p4; do
    name=${source%.p4}
    # The compiler knows the format by the suffix .txt; the line numbers it adds to the JSON are noise.
    p4c-bm2-ss --arch v1model --Werror --p4runtime-files "$name.p4info.txt" -o "$name.raw.json" "$source"
    mv "$name.p4info.txt" "$name.p4info.txtpb"
    python3 - "$name" <<'PYTHON'
import json
import pathlib
import sys


def strip(node):
    if isinstance(node, dict):
        return {key: strip(value) for key, value in node.items() if key != "source_info"}
    return [strip(value) for value in node] if isinstance(node, list) else node


raw = pathlib.Path(sys.argv[1] + ".raw.json")
pathlib.Path(sys.argv[1] + ".json").write_text(json.dumps(strip(json.loads(raw.read_text())), indent=1) + "\n")
raw.unlink()
PYTHON
done
