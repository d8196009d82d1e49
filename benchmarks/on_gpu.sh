#!/bin/sh
# on_gpu.sh CARRIED OUT: the GPU suite, the benchmarks and a replay on a machine with a CUDA device and no network.
# CARRIED holds the wheels of the core and the plugins (entry points need them), wheels of what that machine lacks,
# trace.jsonl, and model files *.json. Results go to OUT.
set -eu

carried=$1
out=$2
site=$(mktemp -d)
python3 -m pip install --quiet --no-index --no-deps --no-compile --target "$site" "$carried"/*.whl
export PYTHONPATH="$site" PYTHONUNBUFFERED=1
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader

python3 -m pytest -p no:cacheprovider -q -m gpu tests/gpu 2>&1 | tee "$out/gpu-tests.txt" | tail -n 30

for model in deepseek-v4-flash "$carried"/*.json; do
	name=$(basename "$model" .json)
	python3 -m hicache_core.cli replay "$carried/trace.jsonl" --model "$model" --platform cuda --device cuda \
		--io-backend kernel --layout page_first --policy write_through --limit "${REQUESTS:-500}" \
		--device-blocks "${DEVICE_BLOCKS:-3000}" --host-blocks "${HOST_BLOCKS:-10000}" \
		--report "$out/replay-$name.json"
done

python3 benchmarks/transfer.py --out "$out/transfer.json" > "$out/transfer.log"
python3 benchmarks/profile_host.py --out "$out/profile.json"
