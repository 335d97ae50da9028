#!/bin/bash
set -x
backend=fsdp # fsdp, fsdp2, megatron
project_name=blocks
adv_estimator=rloo
use_kl_in_reward=False
use_kl_loss=True
kl_loss_coef=0.002
actor_lr=2e-6
actor_model_path="Qwen/Qwen2.5-1.5B-Instruct"
gsm8k_train_path=$HOME/data/gsm8k/train.parquet
gsm8k_test_path=$HOME/data/gsm8k/test.parquet
critic_model_path=$actor_model_path
max_prompt_length=$((1024))
max_response_length=$((512))
train_batch_size=128
ppo_mini_batch_size=64
n_resp_per_prompt=4
actor_max_token_len_per_gpu=$(((max_prompt_length + max_response_length) * 4))
enable_gradient_checkpointing=True
param_offload=False
usp_size=1

ACTOR_FSDP_CONFIG="
    actor_rollout_ref.actor.fsdp_config.param_offload=$param_offload \
    actor_rollout_ref.actor.ulysses_sequence_parallel_size=$usp_size"

# Actor model config
ACTOR_CONFIG="
    actor_rollout_ref.actor.optim.lr=$actor_lr \
    actor_rollout_ref.model.path=$actor_model_path \
    actor_rollout_ref.model.use_remove_padding=True \
    actor_rollout_ref.model.enable_gradient_checkpointing=${enable_gradient_checkpointing} \
    actor_rollout_ref.actor.use_kl_loss=$use_kl_loss \
    actor_rollout_ref.actor.kl_loss_coef=$kl_loss_coef \
    actor_rollout_ref.actor.use_dynamic_bsz=True \
    actor_rollout_ref.actor.ppo_mini_batch_size=$ppo_mini_batch_size \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$actor_max_token_len_per_gpu"

CRITIC_CONFIG="
    critic.model.path=$critic_model_path \
    critic.model.use_remove_padding=True"
CRITIC_FSDP_CONFIG="${ACTOR_FSDP_CONFIG//actor_rollout_ref.actor/critic.model}"

if [[ $backend == "megatron" ]]; then
    CONFIG_NAME=ppo_megatron_trainer
    ACTOR_CONFIG="$ACTOR_CONFIG $ACTOR_MEGATRON_CONFIG"
else # fsdp, fsdp2
    CONFIG_NAME=ppo_trainer
    ACTOR_CONFIG="$ACTOR_CONFIG $ACTOR_FSDP_CONFIG"
    if [[ $adv_estimator == "gae" ]]; then
        CRITIC_CONFIG="$CRITIC_CONFIG $CRITIC_FSDP_CONFIG"
    else
        CRITIC_CONFIG=""
    fi
fi

ROLLOUT_CONFIG="
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.mode=async \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.8 \
    actor_rollout_ref.rollout.n=$n_resp_per_prompt \
    actor_rollout_ref.rollout.temperature=0.7"

export VLLM_ATTENTION_BACKEND=FLASH_ATTN
cd /workspace/verl

python -m verl.trainer.main_ppo \
    --config-path=./config \
    --config-name=$CONFIG_NAME \
    algorithm.adv_estimator=$adv_estimator \
    algorithm.use_kl_in_reward=$use_kl_in_reward \
    data.train_files="$gsm8k_train_path" \
    data.val_files="$gsm8k_test_path" \
    data.return_raw_chat=True \
    data.train_batch_size=$train_batch_size \
    data.max_prompt_length=$max_prompt_length \
    data.max_response_length=$max_response_length \
    data.filter_overlong_prompts=True \
    data.truncation='error' \
    trainer.critic_warmup=0 \
    trainer.logger=['console','tensorboard'] \
    trainer.project_name=$project_name \
    trainer.experiment_name=one \
    trainer.n_gpus_per_node=$SLURM_GPUS_PER_NODE \
    trainer.nnodes=1 \
    trainer.save_freq=30 \
    trainer.test_freq=10 \
    trainer.total_epochs=3 \
    $ACTOR_CONFIG \
    $CRITIC_CONFIG \
    $ROLLOUT_CONFIG
