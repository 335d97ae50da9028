#!/usr/bin/env bash
# DAPO of a 7B base model, in the style of the project's recipe scripts
set -xeuo pipefail
project_name='DAPO'
exp_name=${EXP:-'dapo-7b'}
adv_estimator=grpo
use_kl_in_reward=False
use_kl_loss=False
clip_ratio_low=0.2
clip_ratio_high=0.28
max_prompt_length=$((1024 * 2))
max_response_length=$((1024 * 8))
enable_overlong_buffer=True
overlong_buffer_len=$((1024 * 4))
overlong_penalty_factor=1.0
enable_filter_groups=True
max_num_gen_batches=10
train_prompt_bsz=256
n_resp_per_prompt=16
train_prompt_mini_bsz=32
TRAIN_FILE=${TRAIN_FILE:-"data/dapo-math-17k.parquet"}
TEST_FILE=${TEST_FILE:-"data/aime-2024.parquet"}

ray job submit --no-wait -- python3 -m recipe.dapo.main_dapo \
    data.train_files="${TRAIN_FILE}" data.val_files="${TEST_FILE}" data.prompt_key=prompt data.truncation='left' \
    data.max_prompt_length=${max_prompt_length} data.max_response_length=${max_response_length} \
    data.train_batch_size=${train_prompt_bsz} data.gen_batch_size=$((train_prompt_bsz * 3)) \
    actor_rollout_ref.rollout.n=${n_resp_per_prompt} algorithm.adv_estimator=${adv_estimator} \
    algorithm.use_kl_in_reward=${use_kl_in_reward} actor_rollout_ref.actor.use_kl_loss=${use_kl_loss} \
    actor_rollout_ref.actor.clip_ratio_low=${clip_ratio_low} actor_rollout_ref.actor.clip_ratio_high=${clip_ratio_high} \
    actor_rollout_ref.actor.clip_ratio_c=10.0 algorithm.filter_groups.enable=${enable_filter_groups} \
    algorithm.filter_groups.metric=acc algorithm.filter_groups.max_num_gen_batches=${max_num_gen_batches} \
    actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$((max_prompt_length + max_response_length)) \
    actor_rollout_ref.model.path="${MODEL_PATH:-models/Qwen2.5-7B}" actor_rollout_ref.actor.optim.lr=2e-6 \
    actor_rollout_ref.actor.optim.lr_warmup_steps=5 actor_rollout_ref.actor.optim.weight_decay=0.1 \
    actor_rollout_ref.actor.ppo_mini_batch_size=${train_prompt_mini_bsz} actor_rollout_ref.actor.loss_agg_mode=token-mean \
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.temperature=1.0 actor_rollout_ref.rollout.top_p=1.0 actor_rollout_ref.rollout.top_k="-1" \
    reward_model.reward_manager=dapo reward_model.overlong_buffer.enable=${enable_overlong_buffer} \
    reward_model.overlong_buffer.len=${overlong_buffer_len} reward_model.overlong_buffer.penalty_factor=${overlong_penalty_factor} \
    trainer.logger='["console","wandb"]' trainer.project_name="${project_name}" trainer.experiment_name="${exp_name}" \
    trainer.n_gpus_per_node=8 trainer.test_freq=5 trainer.save_freq=5 trainer.total_epochs=1 trainer.resume_mode=auto
