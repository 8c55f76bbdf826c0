#!/usr/bin/env bash
# Everything that needs a CUDA GPU, in one go: the tests marked `cuda`, a real run per mode and per recipe, the benchmark.
#   bash scripts/gpu_check.sh [FOLDER for the results, default gpu_check]
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=$(realpath -m "${1:-gpu_check}")
python=${PYTHON:-python3}
mkdir -p "$out"
status=0
"$python" -m pytest -m cuda -q -p no:cacheprovider 2>&1 | tee "$out/tests.txt" || status=1
run() { # NAME OVERRIDE...
    "$python" train.py device=cuda log.progress=false run_dir="$out/runs/$1" "${@:2}" 2>&1 | tee -a "$out/runs.txt" || status=1
}
for mode in fp32 tf32 bf16 fp16 fp16_capped o2 o3 bf16_pure; do
    run "classification_$mode" amp=$mode
done
for recipe in segmentation gan language_model face_recognition custom_function distillation contrastive; do
    for mode in bf16 fp16; do
        run "${recipe}_$mode" recipe=$recipe amp=$mode
    done
done
for mode in fp8 o2 bf16_pure; do
    run "language_model_$mode" recipe=language_model amp=$mode
done
# Two stages need two GPUs.
if [ "$("$python" -c 'import torch; print(torch.cuda.device_count())')" -ge 2 ]; then
    run model_parallel_bf16 recipe=model_parallel
fi
for recipe in classification segmentation gan language_model face_recognition custom_function distillation contrastive; do
    echo "### $recipe"
    "$python" scripts/report.py "$out"/runs/"$recipe"_*
done 2>&1 | tee "$out/runs.md"
"$python" scripts/bench.py cost --json "$out/cost.json" 2>&1 | tee "$out/cost.txt" || status=1
"$python" scripts/bench.py step --json "$out/step.json" --picture "$out/step.png" 2>&1 | tee "$out/step.txt" || status=1
exit $status
