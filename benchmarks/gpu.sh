#!/usr/bin/env bash
# Runs the measurements of docs/performance-gpu.md, each as a stage of its own, and writes one JSON file for each stage.
#
#   benchmarks/gpu.sh OUT STAGE… -- TASK…        TASK: a JSONL file with prompts, or builtin
#
# Stages: draft-phase draft-phase-8b products first-token shapes price price-8b texts texts-fp16 batch-texts throughput throughput-8b
# one-request host-requests peers peers-model serve serve-8b soak
# MODEL and DRAFTER (environment) are the target and its drafter; without them, the embedded pair. `peers` is always the
# embedded pair; `peers-model` is MODEL, with ASSISTANT as transformers' assistant. `one-request` compares with the version
# of windfall whose `src` folder is BEFORE. `serve` compares the numbers of HTTP processes in HTTP_PROCESSES, such as
# 0,2,4. A stage that fails or takes longer than LIMIT seconds (600) does not stop the others; the exit code is the number
# of such stages.
# `python benchmarks/tables.py --take OUT` puts the results into the documentation.
set -u
cd "$(dirname "$0")/.."
OUT=$1
shift
STAGES=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do
	STAGES+=("$1")
	shift
done
shift
PY=${PYTHON:-python3}
TARGET="${MODEL:+--target $MODEL} ${DRAFTER:+--drafter $DRAFTER}"
LIMIT=${LIMIT:-600}
BATCH_METHODS=${BATCH_METHODS:-none,beam,chain,tetris,batch-gt,smart,survival,auto}
TASKS=$(IFS=, && echo "$*")
mkdir -p "$OUT"
failed=0

# run NAME COMMAND…: one stage, with its output in OUT/NAME.log
run() {
	local name=$1 start=$SECONDS
	shift
	if timeout "$LIMIT" "$@" >"$OUT/$name.log" 2>&1; then
		echo "$name: $((SECONDS - start)) s"
	else
		echo "$name: exit code $? after $((SECONDS - start)) s"
		tail -3 "$OUT/$name.log"
		failed=$((failed + 1))
	fi
}

throughput() {
	local name=$1 limit=$2
	shift 2
	run "$name" "$PY" -m windfall bench throughput $TARGET --concurrency 1,2,4,8,16,32,64,128 --methods $BATCH_METHODS \
		--tasks "$TASKS" --limit "$limit" --arrivals stream --temperature 0 --out "$OUT/$name.json" "$@"
}

serve() {
	run "$stage" "$PY" benchmarks/serve_overhead.py "$@" --limit 16 --kv-memory 16GB --json "$json" \
		${HTTP_PROCESSES:+--http-processes $HTTP_PROCESSES}
}

# peers NAME TASKS AND OPTIONS…: transformers and windfall, and what peers_vllm.py wrote to OUT/NAME-vllm*.json
peers() {
	local name=$1 files=() file
	shift
	for file in "$OUT/$name"-vllm*.json; do
		[ -e "$file" ] && files+=(--vllm "$file")
	done
	run "$name" "$PY" benchmarks/peers.py "$@" "${files[@]}" --resume --json "$OUT/$name.json"
}

for stage in "${STAGES[@]}"; do
	json=$OUT/$stage.json
	case $stage in
	draft-phase) run $stage "$PY" benchmarks/draft_phase.py $TARGET --json "$json" ;;
	draft-phase-8b) run $stage "$PY" benchmarks/draft_phase.py $TARGET --widen llama-3.1-8b --json "$json" ;;
	products) run $stage "$PY" benchmarks/products.py --json "$json" ;;
	first-token) run $stage "$PY" benchmarks/first_token.py $TARGET --json "$json" ;;
	shapes) run $stage "$PY" benchmarks/shapes.py --length 512 --json "$json" ;;
	price) run $stage "$PY" benchmarks/exact.py "$@" $TARGET --limit 10 --policies auto,beam --json "$json" ;;
	price-8b) run $stage "$PY" benchmarks/exact.py "$@" $TARGET --limit 4 --policies auto --widen llama-3.1-8b --json "$json" ;;
	texts) run $stage "$PY" benchmarks/exact.py "$@" $TARGET --limit 40 --texts --modes exact --json "$json" ;;
	texts-fp16) run $stage "$PY" benchmarks/exact.py "$@" $TARGET --limit 7 --dtype float16 --texts --modes exact --json "$json" ;;
	batch-texts) run $stage "$PY" benchmarks/batch_texts.py "$@" $TARGET --limit 40 --json "$json" ;;
	throughput) throughput $stage 24 --rounds 2 --stream-factor 12 --no-hf ;;
	throughput-8b) throughput $stage 16 --rounds 1 --stream-factor 6 --widen llama-3.1-8b --no-hf ;;
	one-request) run $stage "$PY" benchmarks/one_request.py "$BEFORE" "$@" $TARGET --json "$json" ;;
	host-requests) run $stage "$PY" benchmarks/host_requests.py "$@" $TARGET --json "$json" ;;
	peers) peers $stage "$@" ;;
	peers-model) peers $stage "$@" $TARGET ${ASSISTANT:+--assistant $ASSISTANT} ;;
	serve) serve "$@" $TARGET ;;
	serve-8b) serve "$@" $TARGET --widen llama-3.1-8b ;;
	soak) run $stage "$PY" benchmarks/soak.py $TARGET --pages --max-requests 64 --tokens 240 --kv-memory 50MB --json "$json" ;;
	*) echo "no stage $stage" && failed=$((failed + 1)) ;;
	esac
done
exit $failed
