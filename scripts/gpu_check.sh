#!/usr/bin/env bash
# Everything that needs a CUDA GPU, in one go: the tests marked `cuda`, a real run per mode, the benchmark.
#   bash scripts/gpu_check.sh [FOLDER for the results, default gpu_check]
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=$(realpath -m "${1:-gpu_check}")
python=${PYTHON:-python3}
mkdir -p "$out"
status=0
"$python" -m pytest -m cuda -q -p no:cacheprovider 2>&1 | tee "$out/tests.txt" || status=1
for mode in fp32 tf32 bf16 fp16; do
    "$python" train.py device=cuda amp=$mode run_dir="$out/runs/$mode" log.progress=false 2>&1 | tee -a "$out/runs.txt" || status=1
    cp "$out/runs/$mode/summary.json" "$out/summary_$mode.json" || status=1
done
"$python" scripts/bench.py --json "$out/bench.json" 2>&1 | tee "$out/bench.txt" || status=1
exit $status
