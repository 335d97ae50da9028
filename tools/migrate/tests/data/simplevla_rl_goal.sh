DATASET_NAME="libero_goal"
python -m verl.trainer.main_ppo data.task_suite_name=$DATASET_NAME data.num_trials_per_task=50 data.n_samples=8 data.filter_accuracy=False \
    data.train_batch_size=64 data.val_batch_size=496 actor_rollout_ref.model.path=ckpt actor_rollout_ref.model.vla=openvla-oft \
    actor_rollout_ref.model.lora_rank=32 actor_rollout_ref.actor.optim.lr=5e-6 actor_rollout_ref.actor.ppo_mini_batch_size=128 \
    actor_rollout_ref.rollout.temperature=1.6 actor_rollout_ref.rollout.unnorm_key=$DATASET_NAME algorithm.kl_ctrl.kl_coef=0.00 \
    algorithm.adv_estimator=grpo trainer.total_epochs=100 trainer.test_freq=4
