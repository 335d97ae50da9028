# Answers weighed by how likely the trainer finds what the engine wrote, up to a cap; a sampled validation
python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo algorithm.rollout_correction.rollout_is=token \
    algorithm.rollout_correction.rollout_is_threshold=3.0 algorithm.rollout_correction.rollout_rs=null \
    data.train_files=data/math.parquet data.train_batch_size=48 data.max_response_length=1024 \
    actor_rollout_ref.model.path=model actor_rollout_ref.actor.ppo_mini_batch_size=24 \
    actor_rollout_ref.actor.clip_ratio_high=0.28 actor_rollout_ref.actor.optim.lr=2e-6 \
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=8 actor_rollout_ref.rollout.calculate_log_probs=True \
    actor_rollout_ref.rollout.val_kwargs.do_sample=True actor_rollout_ref.rollout.val_kwargs.top_p=0.7 \
    actor_rollout_ref.rollout.val_kwargs.top_k=-1 actor_rollout_ref.rollout.val_kwargs.n=4 \
    trainer.total_training_steps=60
