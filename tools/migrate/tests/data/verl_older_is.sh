# The weights by the keys of a version before
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=rloo algorithm.rollout_is=True \
    algorithm.rollout_is_threshold=5.0 algorithm.rollout_is_level=sequence algorithm.rollout_is_mode=truncate \
    data.train_files=data/math.parquet data.train_batch_size=64 actor_rollout_ref.model.path=model \
    actor_rollout_ref.actor.ppo_mini_batch_size=64 actor_rollout_ref.rollout.n=4 \
    actor_rollout_ref.rollout.calculate_log_probs=True trainer.total_training_steps=20
