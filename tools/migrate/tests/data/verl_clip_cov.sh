python3 -m recipe.entropy.main_entropy algorithm.adv_estimator=grpo data.train_files="[data/dapo-math-17k.parquet]" data.train_batch_size=256 \
    actor_rollout_ref.model.path=Qwen/Qwen2.5-7B actor_rollout_ref.actor.policy_loss.loss_mode=clip_cov \
    actor_rollout_ref.actor.policy_loss.clip_cov_ratio=0.0004 actor_rollout_ref.actor.clip_ratio_low=0.99 \
    actor_rollout_ref.actor.clip_ratio_high=1.0 actor_rollout_ref.actor.ppo_mini_batch_size=64 \
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=8 trainer.total_epochs=1
