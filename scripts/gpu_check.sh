#!/usr/bin/env bash
# What needs a CUDA GPU, in stages of at most 9 minutes, most telling first:
#   bash scripts/gpu_check.sh 1    tests marked `cuda`, first runs, waits, the step of a small network
#   bash scripts/gpu_check.sh 2    speed: ResNet-50, GPT-2, compiled, as a graph, in float8
#   bash scripts/gpu_check.sh 3    many identities, where the time of a step goes, every mode
#   bash scripts/gpu_check.sh 4    every recipe to its end
# What a stage found is one file, $OUT/stage1.tar.gz (default of OUT: gpu_check). It is written anew after every step, so
# a stage that is killed loses the step at work. Each step has a limit of its own and is left out when no time is left.
#   SECONDS_LEFT=1200 bash scripts/gpu_check.sh 3       another budget than 540 seconds
#   TINY=1 DEVICE=cpu bash scripts/gpu_check.sh 1       a rehearsal without a GPU
# PYTHON, if not the environment of `make setup`. Without a network: scripts/pack_wheels.py.
# Exit code 1: a step failed, or did not end within its limit. One that the budget cut short is no failure.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
stage=${1:-}
case $stage in
    [1-4]) ;;
    *) echo "error: stage=$stage: expected 1, 2, 3 or 4, as in: bash scripts/gpu_check.sh 1" >&2; exit 2 ;;
esac
if [ -z "${PYTHON:-}" ]; then
    PYTHON=python3
    [ -x .venv/bin/python ] && PYTHON=.venv/bin/python
fi
device=${DEVICE:-cuda} tiny=${TINY:-}
deadline=$(($(date +%s) + ${SECONDS_LEFT:-540}))
out=$(realpath -m "${OUT:-gpu_check}")
scratch=$(mktemp -d)
trap '[ -n "${!:-}" ] && kill -KILL -- -$! 2> /dev/null; rm -rf "$scratch"' EXIT
work=$scratch/stage$stage
mkdir -p "$out" "$work"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} PYTHONUNBUFFERED=1
status=0

# step LIMIT LINES NAME COMMAND...: at most LIMIT seconds. Its output is NAME.txt, its last LINES are shown, and it has a
# line in summary.txt.
step() {
    local limit=$1 lines=$2 name=$3 left=$((deadline - $(date +%s))) began=$SECONDS code=0 said=ok cut=
    shift 3
    [ -n "$tiny" ] && limit=$((3 * limit)) # the CPU of a rehearsal may be busy
    if [ "$left" -lt 5 ]; then
        echo "### $name: left out, no time" | tee -a "$work/summary.txt"
        keep
        return
    fi
    [ "$left" -lt "$limit" ] && limit=$left cut=yes
    timeout -k 10 "$limit" "$@" > "$work/$name.txt" 2>&1 < /dev/null &
    wait $! || code=$?
    kill -KILL -- -$! 2> /dev/null # what a step that was stopped has left would hold memory of the GPU
    case $code in
        0) ;;
        124 | 137) said="stopped after $limit s" && [ -z "$cut" ] && status=1 ;;
        *) said="FAILED with $code" status=1 ;;
    esac
    echo "### $name: $said, $((SECONDS - began)) s" | tee -a "$work/summary.txt"
    # Without the progress of pytest.
    grep -vE '^(\[gw[0-9]+\]|tests/)' "$work/$name.txt" | tail -n "$lines" | cut -c 1-150
    keep
}
# All that was found so far, without the weights of the runs. A rename is whole or not at all.
keep() {
    tar -C "$scratch" --exclude=checkpoints -czf "$out/stage$stage.part" "stage$stage" &&
        mv "$out/stage$stage.part" "$out/stage$stage.tar.gz" || status=1
}
# bench LIMIT NAME BENCHMARK OPTION...: also writes NAME.json and NAME.png.
bench() {
    local limit=$1 name=$2
    shift 2
    step "$limit" 12 "$name" "$PYTHON" scripts/bench.py "$@" --device "$device" --json "$work/$name.json" \
        --picture "$work/$name.png"
}
# run LIMIT NAME OVERRIDE...: a run of train.py.
run() {
    local limit=$1 name=$2
    shift 2
    [ -n "$tiny" ] && set -- "$@" steps=2
    # Some CPUs take minutes for convolutions in fp16.
    [ -n "$tiny" ] && [[ $name = classification* ]] && set -- "$@" model=mlp
    step "$limit" 3 "run_$name" "$PYTHON" train.py device="$device" log.progress=false run_dir="$work/runs/$name" "$@"
}
if [ -n "$tiny" ]; then
    # Inductor takes minutes for a CPU.
    resnet=cnn images=8 pixels=32 gpt=gpt texts=2 length=64 width=32 depth=1 heads=2 identities=1000,2000
    steps=4 warm=4 workers=2 modes=fp32,bf16 short=(--rounds 2 --slice 0.05) recipes=(classification)
    both=default all=default,graph compile= loaders=0
else
    resnet=resnet50 images=256 pixels=224 gpt=gpt2 texts=16 length=1024 width=768 depth=12 heads=12
    identities=1000000,10000000 steps=48 warm=16 workers=6 modes=fp32,tf32,bf16,fp16,o2,bf16_pure,fp8
    short=(--rounds 5 --slice 1.0 --longest 10) recipes=(classification language_model segmentation gan face_recognition)
    both=default,compile all=default,compile,graph compile=--compile loaders=8
fi

# Also imports what stages use and a bare machine may lack.
versions='
import hydra_plugins.hydra_joblib_launcher, hypothesis, mlxtend, pytest_timeout, torch, xdist
import amp_core.vision, train
amp_core.vision.import_torchvision()
print("torch", torch.__version__, "CUDA", torch.version.cuda, "cuDNN", torch.backends.cudnn.version())
for i in range(torch.cuda.device_count()): print(torch.cuda.get_device_properties(i))'

stage_1() {
    step 60 9 versions "$PYTHON" -c "$versions"
    # -W default: a warning of another torch is no failure here. Each worker imports only the files that have such tests.
    # A test that hangs in a kernel ends with its worker, and costs itself alone: xdist starts another one.
    step 300 40 tests "$PYTHON" -m pytest $(grep -rl --include='test_*.py' 'mark\.cuda' tests) -m cuda -W default \
        -n $workers --timeout=60 --timeout-method=thread -v -rfE --tb=short -p no:cacheprovider \
        --junitxml="$work/tests.xml"
    for mode in bf16 fp16 fp32; do
        run 40 classification_$mode amp=$mode
    done
    bench 60 waits waits --recipes "$([ -n "$tiny" ] && echo classification || echo classification,gan,language_model)"
    bench 60 mlp step --work mlp --accumulation 1 --against best,textbook,ours "${short[@]}"
}
stage_2() {
    # Images per second, the loop alone: by hand, Accelerate, Fabric, the Trainer, timm. Then tokens per second.
    bench 120 resnet step --work $resnet --batch-size $images --modes bf16 --accumulation 1 --channels-last "${short[@]}"
    bench 120 gpt step --work $gpt --batch-size $texts --modes bf16 --accumulation 1 "${short[@]}"
    # The same in whole runs of train.py, data included.
    bench 110 resnet_run modes --recipes classification --size full --modes bf16 --set model=$resnet \
        --set data=synthetic --set data.image_size=$pixels --set data.num_workers=$loaders --batch-size $images \
        --set perf.channels_last=true --vary perf=$both --steps $steps --warm $warm --longest 100
    # A step that consists of starting kernels.
    bench 80 graph_run modes --recipes classification --size full --modes fp32,bf16 --set model=mlp \
        --set data=synthetic --set data.image_size=8 --batch-size 16 --vary perf=$all \
        --steps $((steps * 8)) --warm $((warm * 4)) --longest 60
    # float8 beside bfloat16: the blocks of GPT-2 on bytes.
    bench 110 fp8_run modes --recipes language_model --size full --modes bf16,fp8 --set data.length=$length \
        --set model.options.width=$width --set model.options.depth=$depth --set model.options.heads=$heads \
        --batch-size $texts --vary perf=$both --steps $steps --warm $warm --longest 100
    bench 120 gpt_compiled step --work $gpt --batch-size $texts --modes bf16 --accumulation 1 $compile "${short[@]}"
}
stage_3() {
    # Class centres of many identities.
    bench 150 identities modes --recipes face_recognition --size full --modes bf16 --set data=synthetic_identities \
        --set recipe.sample_rate=0.1 --vary data.num_classes=$identities --steps $steps --warm $warm --longest 140 \
        --no-flops
    for recipe in "${recipes[@]}"; do
        step 60 15 profile_$recipe "$PYTHON" scripts/doctor.py advise recipe=$recipe device="$device" amp=bf16 \
            --json "$work/profile_$recipe.json"
    done
    for recipe in "${recipes[@]}"; do
        bench 90 modes_$recipe modes --recipes $recipe --modes $modes --steps $steps --warm 8
    done
}
stage_4() {
    local more=(language_model segmentation gan face_recognition custom_function distillation contrastive
        diffusion experts policy_gradient speech finetuning)
    local graphs=(segmentation language_model face_recognition custom_function distillation contrastive)
    local others=(tf32 fp16_capped o1 o2 o3 bf16_pure fp8)
    [ -n "$tiny" ] && more=(custom_function experts) graphs=(custom_function) others=(o2)
    for mode in bf16 fp16; do
        for recipe in "${more[@]}"; do
            run 60 ${recipe}_$mode recipe=$recipe amp=$mode
        done
    done
    for recipe in "${graphs[@]}"; do
        run 60 graph_$recipe recipe=$recipe perf=graph
    done
    for mode in "${others[@]}"; do
        run 40 classification_$mode amp=$mode
    done
    # Two stages need two GPUs.
    if "$PYTHON" -c 'import sys, torch; sys.exit(torch.cuda.device_count() < 2)'; then
        run 60 model_parallel_bf16 recipe=model_parallel
    fi
    deadline=$((deadline + 20)) # of finished runs, for which there is always time
    step 20 40 report "$PYTHON" scripts/report.py "$work/runs" --out "$work/runs.html"
}
stage_$stage
echo "### $(grep -c ': ok' "$work/summary.txt") of $(wc -l < "$work/summary.txt") steps passed: $out/stage$stage.tar.gz"
exit $status
