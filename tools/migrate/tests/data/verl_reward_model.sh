python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=data/full_hh_rlhf/rl/train.parquet data.train_batch_size=512 \
    actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=5 \
    reward_model.enable=True reward_model.model.path=models/FsfairX-LLaMA3-RM-v0.1 trainer.total_epochs=1
