python3 -m verl.trainer.main_ppo algorithm.adv_estimator=reinforce_plus_plus algorithm.gamma=0.999 data.train_files=data/math/train.parquet \
    data.train_batch_size=128 actor_rollout_ref.model.path=Qwen/Qwen2.5-7B actor_rollout_ref.actor.ppo_mini_batch_size=128 \
    actor_rollout_ref.actor.entropy_coeff=0.001 actor_rollout_ref.rollout.name=vllm trainer.total_epochs=3
