#!/bin/sh
# on_gpu.sh CARRIED OUT: the GPU suite, the benchmarks and a replay on a machine with a CUDA device and no network.
# CARRIED holds the wheels of the core and the plugins (entry points need them), wheels of what that machine lacks,
# trace.jsonl, and deepseek-v4-flash-unified-rows.json: that model with the variant of the unified rows on CUDA as
# well, for their size. Results go to OUT.
set -eu

carried=$1
out=$2
site=$(mktemp -d)
python3 -m pip install --quiet --no-index --no-deps --no-compile --target "$site" "$carried"/*.whl
export PYTHONPATH="$site" PYTHONUNBUFFERED=1
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader

python3 -m pytest -p no:cacheprovider -q -m gpu tests/gpu 2>&1 | tee "$out/gpu-tests.txt" | tail -n 30

# replay NAME MODEL REQUESTS DEVICE_BLOCKS HOST_BLOCKS SWA_PAGES: all layers and all pools, the report under NAME.
replay() {
	python3 -m hicache_core.cli replay "$carried/trace.jsonl" --model "$2" --platform cuda --device cuda \
		--io-backend kernel --layout page_first --policy write_through --limit "$3" \
		--device-blocks "$4" --host-blocks "$5" --swa-pages "$6" --report "$out/replay-$1.json"
}

replay deepseek-v4-flash deepseek-v4-flash 500 3000 10000 1000
replay deepseek-v4-flash-unified-rows "$carried/deepseek-v4-flash-unified-rows.json" 500 3000 10000 1000
replay deepseek-v4-pro deepseek-v4-pro 2000 3000 6000 1000

python3 benchmarks/transfer.py --out "$out/transfer.json" > "$out/transfer.log"
python3 benchmarks/profile_host.py --out "$out/profile.json"
