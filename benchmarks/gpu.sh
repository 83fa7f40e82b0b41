#!/usr/bin/env bash
# A day on a GPU, in calls of under ten minutes each: each part measures, writes DIR/NAME.json and prints a table.
#
#   benchmarks/gpu.sh [--out DIR] [--wheels DIR] [--nccl LIB] [--dry-run] all | NAME...
#
#   tests       all tests marked cuda
#   matrix      every strategy, precision and kind of checkpoint on one GPU: trains, saves, resumes
#   compiled    the same with train.compile=true
#   syncs       hidden waits for the GPU in a step, by line (at most one)
#   gpt2        GPT-2 124M: tokens/s and MFU beside nanoGPT's loop (1.0 x)
#   resnet      ResNet-50 from memory and from JPEG files beside a bare loop (0.97 x)
#   memory      peaks beside what planner.memory foretells (within 10 %)
#   checkpoint  saving from a GPU's memory, and loading
#   exact       train.exact: one hash under each strategy, and its cost (1.15 x)
#   ranks       two ranks to their end, every all-reduce, fsdp, hybrid, parameter_server: on two GPUs, or on one,
#               which needs NCCL 2.30, from --nccl if torch has an older one
#   packed      packed documents of GPT-2: FlashAttention beside the mask, their time and their difference (1.0 x)
#   sanitized   the tests again with TORCH_CUDA_SANITIZER=1: no stream reads what another has yet to write
#   table       what DIR holds by now, as DIR/gpu.json and DIR/gpu.txt
#
# Where a call may take ten minutes, call it with one name after another, then with `table`; `all` is all of that.
# --wheels: a folder of what the machine's Python lacks, installed beside it for this call; made elsewhere by
#           pip wheel --no-deps -w DIR hydra-core==1.3.2 omegaconf==2.3.0 antlr4-python3-runtime==4.9.3. --nccl: a libnccl.so. --dry-run: tiny sizes on the CPU.
# By hand, since tests/gpu/test_simulated.py cannot show it: `nsys profile` of 20 steps of an MLP, a ResNet and a GPT
# (launches, and gaps between kernels); comm.timeline and train.cudnn_benchmark off in turns; a rank of two killed
# during an all-reduce of NCCL (is the step before saved?), with TORCH_FR_BUFFER_SIZE=200; a model on two devices of
# each rank under ddp; two hosts with
# distributed.timeout_s=30 (who speaks first); python -m benchmarks.drill on 4 GPUs with a batch norm.
# Ends with status 1 when a part failed or missed its bar.
set -uo pipefail

cd "$(dirname "$0")/.." || exit
out=gpu_day wheels="" dry=() names=() python=${PYTHON:-python3}
parts=(tests matrix compiled syncs gpt2 resnet memory checkpoint exact ranks packed sanitized)
while [ $# -gt 0 ]; do
  case $1 in
    --out) out=$2; shift ;;
    --wheels) wheels=$2; shift ;;
    --nccl) NCCL_LIBRARY=$2; export NCCL_LIBRARY; shift ;;
    --dry-run) dry=(--dry-run) ;;
    all) names+=("${parts[@]}" table) ;;
    -*) sed -n '2,/^set/p' "$0" | sed '$d; s/^# \{0,1\}//'; exit 2 ;;
    *) names+=("$1") ;;
  esac
  shift
done
if [ ${#names[@]} = 0 ]; then
  sed -n '2,/^set/p' "$0" | sed '$d; s/^# \{0,1\}//'
  exit 2
fi

mkdir -p "$out"
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
if [ -n "$wheels" ]; then
  site=$(mktemp -d)
  trap 'rm -rf "$site"' EXIT
  "$python" -m pip install -q --no-index --no-deps --no-compile --target "$site" "$wheels"/*.whl || exit
  export PYTHONPATH=$PYTHONPATH:$site
fi

if [ ${#dry[@]} -gt 0 ]; then # all in one process: to load torch takes longer than these sizes
  export CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1
  "$python" -m benchmarks.gpu "${names[@]}" --out "$out" --dry-run
  exit
fi

status=0
for name in "${names[@]}"; do
  timeout --kill-after=10 580 "$python" -m benchmarks.gpu "$name" --out "$out" 2>&1 | tee "$out/$name.log" || status=1
done
exit $status
