#!/usr/bin/env bash
# The newest form: the launcher is an array that a condition may replace, settings come in arrays, `reward.*` has its own tree
set -xeuo pipefail
ROOT=$(cd -- "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
LOW=${LOW:-10}
SETTINGS=(
    algorithm.adv_estimator=grpo
    data.train_files="['$ROOT/gsm8k/train.parquet', '$ROOT/math/train.parquet']"
    data.train_batch_size=64
    data.max_response_length=$((512 * 2))
    actor_rollout_ref.model.path="$ROOT/models/small"
    actor_rollout_ref.actor.policy_loss.loss_mode=cispo
    actor_rollout_ref.actor.clip_ratio_low=${LOW}
    actor_rollout_ref.actor.clip_ratio_high=0.2
    actor_rollout_ref.actor.ppo_mini_batch_size=32
    actor_rollout_ref.actor.use_dynamic_bsz=True
    actor_rollout_ref.actor.optim.betas=[0.9,0.98]
    actor_rollout_ref.actor.fsdp_config.full_determinism=False
)
ROLLOUT=(
    actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.n=8
    actor_rollout_ref.rollout.max_model_len=3072
    actor_rollout_ref.rollout.enable_prefix_caching=True
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6
    actor_rollout_ref.rollout.checkpoint_engine.backend=naive
)
NEW=(
    reward.reward_manager.name=naive
    reward.num_workers=4
    trainer.use_v1=True
    trainer.v1.trainer_mode=sync
    trainer.total_epochs=2
)
LAUNCH=(python3)
if [ "${USE_UV:-1}" != 0 ]; then
    uv sync --frozen
    LAUNCH=(uv run --frozen python3)
fi
"${LAUNCH[@]}" -m verl.trainer.main_ppo "${SETTINGS[@]}" "${ROLLOUT[@]}" "${NEW[@]}" "$@"
