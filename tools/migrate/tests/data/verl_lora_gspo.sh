#!/bin/bash
# GSPO with adapters; the words in arrays, as newer scripts have them
rollout_n=16
DATA=(
    data.train_files=data/deepscaler/train.parquet
    data.train_batch_size=128
    data.max_response_length=4096
)
ACTOR=(
    actor_rollout_ref.actor.policy_loss.loss_mode=gspo     # sequence ratio
    actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean
    actor_rollout_ref.actor.clip_ratio_low=3e-4
    actor_rollout_ref.actor.clip_ratio_high=4e-4
    actor_rollout_ref.actor.ppo_mini_batch_size=32
    actor_rollout_ref.actor.optim.lr=3e-5
    actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.05
    actor_rollout_ref.model.lora_rank=64
    actor_rollout_ref.model.lora_alpha=32
    actor_rollout_ref.model.path=models/Qwen3-8B
)
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo "${DATA[@]}" "${ACTOR[@]}" \
    actor_rollout_ref.rollout.name=sglang actor_rollout_ref.rollout.n=$rollout_n trainer.total_epochs=2 "$@"
