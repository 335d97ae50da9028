python3 -m verl.trainer.main_ppo algorithm.adv_estimator=rloo algorithm.use_kl_in_reward=True algorithm.kl_penalty=kl \
    algorithm.kl_ctrl.kl_coef=0.002 data.train_files=data/gsm8k/train.parquet data.val_files=data/gsm8k/test.parquet \
    data.train_batch_size=256 data.max_response_length=384 actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct \
    actor_rollout_ref.actor.ppo_mini_batch_size=64 actor_rollout_ref.actor.ppo_epochs=2 actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n=4 actor_rollout_ref.rollout.top_k=20 trainer.total_epochs=5
