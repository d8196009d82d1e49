#!/bin/sh
# hybrids.sh HICACHE TRACE OUT: hybrid models on the simulator, every pool, 2,000 requests of a trace; reports go to OUT.
# Layers and tokens of a block are cut so that two cores and 8 GB are enough; each report says by how much.
set -eu

hicache=$1
trace=$2
out=$3
mkdir -p "$out"

# replay MODEL PLATFORM OPTION...: one layer of each pool, kernel + page_first, write_through.
replay() {
	model=$1
	platform=$2
	shift 2
	"$hicache" replay "$trace" --model "$model" --platform "$platform" --io-backend kernel --layout page_first \
		--policy write_through --layers 1 --limit "${REQUESTS:-2000}" --device-blocks 400 --host-blocks 4000 \
		--report "$out/$model-$platform.json" "$@"
}

for platform in cuda rocm-mi355x; do
	replay deepseek-v4-pro "$platform" --tokens-per-block 256 --swa-pages 200
	replay qwen3.5-397b-a17b "$platform" --tokens-per-block 64 --state-slots 24
	replay deepseek-v3.2 "$platform" --tokens-per-block 64
done
