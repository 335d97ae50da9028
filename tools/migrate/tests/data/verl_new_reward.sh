# The reward function and its parts by the newer names
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=gdpo +algorithm.gdpo_reward_keys='["right", "format"]' \
    data.train_files=data/tools.parquet actor_rollout_ref.model.path=model \
    reward.custom_reward_function.path=rewards/tools.py reward.custom_reward_function.name=score reward.reward_manager.name=gdpo
