python3 -m verl.trainer.main_ppo algorithm.adv_estimator=remax data.train_files=data/gsm8k/train.parquet \
    data.train_batch_size=64 actor_rollout_ref.model.path=Qwen/Qwen2.5-3B actor_rollout_ref.actor.ppo_mini_batch_size=64 \
    actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.01 actor_rollout_ref.rollout.name=vllm trainer.total_training_steps=40
