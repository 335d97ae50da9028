#!/usr/bin/env bash
set -xeuo pipefail
# GPG on two sources of sums
DATA_ROOT=${DATA_ROOT:-$HOME/data}
first="$DATA_ROOT/gsm8k/train.parquet"
second="$DATA_ROOT/math/train.parquet"
train_files="['$first', '$second']"
test_files="['$DATA_ROOT/gsm8k/test.parquet', '$DATA_ROOT/math/test.parquet']"
N=${N:-6}

python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files="$train_files" \
    data.val_files="$test_files" \
    data.train_batch_size=512 \
    data.max_prompt_length=768 \
    data.max_response_length=1536 \
    data.filter_overlong_prompts=True \
    data.truncation='error' \
    actor_rollout_ref.model.path=Qwen/Qwen2.5-7B-Instruct \
    actor_rollout_ref.actor.optim.lr=2e-6 \
    actor_rollout_ref.model.use_remove_padding=True \
    actor_rollout_ref.actor.ppo_mini_batch_size=128 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8 \
    actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.ref.sync_ref_model=True actor_rollout_ref.ref.ref_model_sync_steps=64 actor_rollout_ref.ref.ref_model_mixup_alpha=0.8 \
    actor_rollout_ref.actor.kl_loss_coef=0.001 \
    actor_rollout_ref.actor.kl_loss_type=low_var_kl \
    actor_rollout_ref.actor.entropy_coeff=0 \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.7 \
    actor_rollout_ref.rollout.n=$N \
    algorithm.use_kl_in_reward=False \
    trainer.critic_warmup=0 \
    trainer.logger='["console","wandb"]' \
    trainer.project_name='gpg' \
    trainer.experiment_name='two_sources' \
    trainer.n_gpus_per_node=8 \
    trainer.nnodes=1 \
    trainer.val_before_train=False \
    trainer.save_freq=20 \
    trainer.test_freq=10 \
    trainer.total_epochs=4 "$@"
