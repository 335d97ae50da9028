DATASET_NAME="robotwin2_click_bell"
python -u -m verl.trainer.main_ppo data.task_suite_name=$DATASET_NAME data.n_samples=8 data.train_batch_size=64 actor_rollout_ref.model.vla=openvla-oft \
    actor_rollout_ref.model.path=ckpt actor_rollout_ref.rollout.twin2_task_config=demo_randomized algorithm.adv_estimator=grpo
