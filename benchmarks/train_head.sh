#!/usr/bin/env bash
# From prompts to a measured draft head, on one GPU: the target's answers, the training, and a comparison with the head
# that the target has now, in one run.
#
#   benchmarks/train_head.sh OUT MINUTES PROMPTS… -- OPTION…      PROMPTS: JSONL files; OPTION: of `windfall train head`
#
# Two processes write the answers, one greedy and one at temperature 1, because one does not keep a GPU busy. Every step
# writes OUT/STEP.log and OUT/STEP.done, and finished steps are skipped, so the same command continues.
# Environment: MODEL (default: the embedded model), DATA_MINUTES (4), HELD_OUT (0.01), DATA_OPTIONS (of `windfall train
# data`), TASKS (the prompts of the comparison, comma-separated; builtin), LIMIT (prompts for each task; 10), WIDEN (also
# compare at the cost of this shape, such as llama-3.1-8b), BENCH_OPTIONS (of `windfall bench speed`).
set -eu
cd "$(dirname "$0")/.."
OUT=$1 MINUTES=$2
shift 2
PROMPTS=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do
	PROMPTS+=("$1")
	shift
done
shift
WINDFALL="${PYTHON:-python3} -m windfall"
TARGET=${MODEL:+--target $MODEL}
mkdir -p "$OUT"

# step NAME COMMAND…: run it unless it is done
step() {
	local name=$1 start=$SECONDS
	shift
	[ -e "$OUT/$name.done" ] && return
	if ! "$@" >"$OUT/$name.log" 2>&1; then
		echo "$name failed after $((SECONDS - start)) s:"
		tail -3 "$OUT/$name.log"
		exit 1
	fi
	echo "$name: $((SECONDS - start)) s" | tee "$OUT/$name.done"
}

# answers NAME OPTION…: a share of the data
answers() {
	local folder=$OUT/$1 given=(--pause-after "${DATA_MINUTES:-4}" --held-out "${HELD_OUT:-0.01}" --shard 500)
	shift
	[ -e "$folder/data.json" ] && given+=(--resume)
	$WINDFALL train data "${PROMPTS[@]}" $TARGET --out "$folder" "${given[@]}" "$@" ${DATA_OPTIONS:-}
}

# all_answers: both shares, in one folder
all_answers() {
	answers sampled --greedy-share 0 --seed 1 &
	answers greedy --greedy-share 1
	wait $!
	local file
	mkdir -p "$OUT/data"
	cp "$OUT"/greedy/data.json "$OUT"/greedy/*-[0-9]*.safetensors "$OUT/data"
	for file in "$OUT"/sampled/*-[0-9]*.safetensors; do # their numbers must not be those of the others
		cp "$file" "$OUT/data/$(basename "$file" | sed -E 's/-0([0-9]{4})\./-1\1./')"
	done
}

train() {
	local given=()
	[ -e "$OUT/new-head/checkpoint.pt" ] && given+=(--resume)
	$WINDFALL train head "$OUT/data" $TARGET --out "$OUT/new-head" --minutes "$MINUTES" "${given[@]}" "$@"
}

# compare NAME OPTION…: auto and beam, with the new head and with the present one
compare() {
	local name=$1
	shift
	$WINDFALL bench speed $TARGET --tasks "${TASKS:-builtin}" --limit "${LIMIT:-10}" --temperature 0,1 --coupled \
		--rounds 1 --no-hf --lengths 512 --methods "none,auto,beam,$OUT/new-head/auto,$OUT/new-head/beam" \
		--out "$OUT/$name.json" "$@" ${BENCH_OPTIONS:-}
}

step answers all_answers
step train train "$@"
step compare compare compare
[ -z "${WIDEN:-}" ] || step compare-wide compare compare-wide --widen "$WIDEN"
