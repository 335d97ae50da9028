python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=data/math/train.parquet actor_rollout_ref.model.path=Qwen/Qwen3-4B \
    custom_reward_function.path=rewards/score.py custom_reward_function.name=compute_score actor_rollout_ref.rollout.name=vllm
