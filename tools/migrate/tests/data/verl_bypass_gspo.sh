# Where the denominator is the rollout's, the loss is PPO's and weighs nothing besides, whatever the keys say
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo algorithm.rollout_correction.bypass_mode=True \
    algorithm.rollout_correction.rollout_is=sequence actor_rollout_ref.actor.policy_loss.loss_mode=gspo \
    data.train_files=data/math.parquet data.train_batch_size=32 actor_rollout_ref.model.path=model \
    actor_rollout_ref.actor.ppo_mini_batch_size=16 actor_rollout_ref.actor.clip_ratio_low=0.1 \
    actor_rollout_ref.rollout.n=8 trainer.total_epochs=2
