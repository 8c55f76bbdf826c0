#!/usr/bin/env bash
# Everything that needs a CUDA GPU, in one go: the tests marked `cuda`, then the benchmarks, then real runs, while time is left.
#   bash scripts/gpu_check.sh [FOLDER for the results, default $OUT or gpu_check]
#   SECONDS_LEFT=3600 bash scripts/gpu_check.sh      # an hour instead of 20 minutes
#   TINY=1 DEVICE=cpu bash scripts/gpu_check.sh      # does it run at all: small networks, no GPU
# PYTHON, if not the environment of `make setup`. Exit code 1: a test or a command failed. Out of time is no failure.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=$(realpath -m "${1:-${OUT:-gpu_check}}")
if [ -z "${PYTHON:-}" ]; then
    PYTHON=python3
    [ -x .venv/bin/python ] && PYTHON=.venv/bin/python
fi
device=${DEVICE:-cuda}
deadline=$(($(date +%s) + ${SECONDS_LEFT:-1200}))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} PYTHONUNBUFFERED=1
mkdir -p "$out"
status=0

# within LIMIT NAME COMMAND...: at most LIMIT seconds, and not beyond the deadline; what it says goes to NAME.txt, too.
within() {
    local limit=$1 name=$2 left=$((deadline - $(date +%s))) code=0
    shift 2
    if [ "$left" -lt 15 ]; then echo "### $name: left out, no time"; return; fi
    [ "$left" -lt "$limit" ] && limit=$left
    echo "### $name"
    timeout "$limit" "$@" 2>&1 | tee -a "$out/$name.txt" || code=$?
    case $code in
        0) ;;
        124) echo "### $name: stopped after $limit s" | tee -a "$out/$name.txt" ;;
        *) echo "### $name: failed with $code" | tee -a "$out/$name.txt"; status=1 ;;
    esac
}
# bench LIMIT NAME BENCHMARK OPTION...: writes NAME.json and NAME.png.
bench() {
    local limit=$1 name=$2
    shift 2
    within "$limit" "$name" "$PYTHON" scripts/bench.py "$@" --device "$device" --json "$out/$name.json" --picture "$out/$name.png"
}

"$PYTHON" -c "import torch, sys; print(torch.__version__, torch.cuda.get_device_name() if torch.cuda.is_available() else 'no GPU')"
within 480 tests "$PYTHON" -m pytest -m cuda -q -p no:cacheprovider

# The large ones first: they are what a CPU cannot show.
if [ -n "${TINY:-}" ]; then
    resnet=resnet18 images=2 pixels=32 gpt=gpt texts=2 length=64 width=32 depth=1 heads=2 identities=1000,2000 steps=4 warm=4
    turns=(--rounds 2 --slice 0.05) small=(--recipes classification,gan --steps 4)
else
    resnet=resnet50 images=256 pixels=224 gpt=gpt2 texts=64 length=1024 width=768 depth=12 heads=12
    identities=1000000,10000000 steps=48 warm=16
    turns=(--rounds 5 --slice 1.0 --longest 10) small=(--steps 32 --warm 8 --modes fp32,tf32,bf16,fp16,o2,bf16_pure,fp8)
fi
# Images per second, the loop alone: by hand, Accelerate, Fabric, the Trainer, timm.
bench 180 resnet step --work $resnet --batch-size $images --modes bf16 --accumulation 1 --compile --channels-last "${turns[@]}"
# Tokens per second.
bench 180 gpt step --work $gpt --batch-size $texts --modes bf16 --accumulation 1 --compile "${turns[@]}"
# The same in whole runs of train.py, data included.
bench 120 resnet_run modes --recipes classification --size full --modes bf16 --set model=$resnet --set data=synthetic \
    --set data.image_size=$pixels --set data.num_workers=8 --batch-size $images --set perf.channels_last=true \
    --vary perf=default,compile --steps $steps --warm $warm --longest 120
# float8 beside bfloat16: the blocks of GPT-2 on bytes.
bench 150 fp8_run modes --recipes language_model --size full --modes bf16,fp8 --set data.length=$length \
    --set model.options.width=$width --set model.options.depth=$depth --set model.options.heads=$heads \
    --batch-size $texts --vary perf=default,compile --steps $steps --warm $warm --longest 120
# A step that consists of starting kernels.
bench 90 graph_run modes --recipes classification --size full --modes fp32,bf16 --set model=mlp --set data=synthetic \
    --set data.image_size=8 --batch-size 16 --vary perf=default,compile,graph --steps $((steps * 8)) --warm $((warm * 4)) \
    --longest 60
# Class centres of many identities.
bench 150 identities_run modes --recipes face_recognition --size full --modes bf16 --set data=synthetic_identities \
    --set recipe.sample_rate=0.1 --vary data.num_classes=$identities --steps $steps --warm $warm --longest 120 --no-flops
bench 120 waits waits --recipes classification,gan,language_model
bench 60 tail tail --rounds 40
bench 150 step step --work mlp,cnn,resnet18,gpt --rounds 8
bench 60 cost cost
bench 300 modes modes "${small[@]}"
bench 120 scale scale

# Runs to their end, with real data.
run() { # NAME OVERRIDE...
    within 120 runs "$PYTHON" train.py device="$device" log.progress=false run_dir="$out/runs/$1" "${@:2}"
}
if [ -z "${TINY:-}" ]; then
    for mode in bf16 fp16 fp32; do
        run "classification_$mode" amp=$mode
    done
    for recipe in language_model segmentation gan face_recognition custom_function distillation contrastive; do
        run "${recipe}_bf16" recipe=$recipe amp=bf16
        run "${recipe}_fp16" recipe=$recipe amp=fp16
    done
    for recipe in segmentation language_model face_recognition custom_function distillation contrastive; do
        run "graph_$recipe" recipe=$recipe perf=graph
    done
    for mode in tf32 fp16_capped o1 o2 o3 bf16_pure fp8; do
        run "classification_$mode" amp=$mode
    done
    # Two stages need two GPUs.
    if [ "$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())')" -ge 2 ]; then
        run model_parallel_bf16 recipe=model_parallel
    fi
    for recipe in classification segmentation gan language_model face_recognition custom_function distillation contrastive; do
        ls -d "$out"/runs/"$recipe"_* > /dev/null 2>&1 || continue
        echo "### $recipe"
        "$PYTHON" scripts/report.py "$out"/runs/"$recipe"_*
    done 2>&1 | tee "$out/runs.md"
    "$PYTHON" scripts/report.py "$out/runs" --out "$out/runs.html" > /dev/null || status=1
fi
exit $status
