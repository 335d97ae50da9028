# No recomputation of the ratio's denominator, and adapters by Megatron's keys; Python's name stands in a variable
PYTHON=${PYTHON:-python3}
$PYTHON -m verl.trainer.main_ppo \
    algorithm.adv_estimator=rloo algorithm.rollout_correction.bypass_mode=true \
    data.train_files=data/math.parquet data.train_batch_size=32 data.max_response_length=256 \
    actor_rollout_ref.model.path=model actor_rollout_ref.model.lora.rank=32 actor_rollout_ref.model.lora.alpha=64 \
    actor_rollout_ref.actor.ppo_mini_batch_size=16 actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=4 \
    actor_rollout_ref.rollout.calculate_log_probs=True trainer.total_training_steps=10
