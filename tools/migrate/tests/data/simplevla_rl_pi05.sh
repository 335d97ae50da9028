VLA_NAME="pi_05"
python -u -m verl.trainer.main_ppo data.task_suite_name=libero_10 data.n_samples=8 data.train_batch_size=32 actor_rollout_ref.model.vla=$VLA_NAME \
    actor_rollout_ref.model.path=ckpt actor_rollout_ref.model.action_chunks_len=8 algorithm.adv_estimator=grpo
