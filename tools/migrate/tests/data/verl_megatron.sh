# Megatron: the schedule and the limit of the gradient have names of their own; the older key of a truncated weight
LR=4e-6
python3 -m verl.trainer.main_ppo --config-path=config --config-name='ppo_megatron_trainer.yaml' \
    algorithm.adv_estimator=grpo data.train_files=data/dapo-math-17k.parquet data.train_batch_size=64 \
    data.max_response_length=$((1024 * 4)) actor_rollout_ref.model.path=model \
    actor_rollout_ref.actor.ppo_mini_batch_size=32 actor_rollout_ref.actor.tis_imp_ratio_cap=2 \
    actor_rollout_ref.actor.optim.lr=$LR actor_rollout_ref.actor.optim.lr_decay_style='cosine' \
    actor_rollout_ref.actor.optim.min_lr=1e-6 actor_rollout_ref.actor.optim.lr_warmup_steps=10 \
    actor_rollout_ref.actor.optim.clip_grad=0.5 actor_rollout_ref.actor.optim.weight_decay=0.1 \
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n=16 actor_rollout_ref.rollout.calculate_log_probs=True trainer.total_training_steps=500
