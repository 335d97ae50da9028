# Rollouts beside the training, by the trainer's own schedule
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=data/math.parquet \
    actor_rollout_ref.model.path=model trainer.use_v1=True trainer.v1.trainer_mode=separate_async \
    trainer.v1.separate_async.parameter_sync_step=4
