#!/usr/bin/env bash
# Run the benchmarks that need a GPU, the most valuable first: benchmarks/gpu.sh --help, --list, --budget SECONDS.
# The code is in benchmarks/gpu.
set -euo pipefail

cd "$(dirname "$0")/.."
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
case " $* " in
  *" --dry-run "*) export CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 ;;
esac
exec "${PYTHON:-python3}" -m benchmarks.gpu "$@"
