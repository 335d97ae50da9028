python3 -m verl.trainer.main_ppo --config-path="$PWD/examples/config" --config-name='gsm8k_multiturn_grpo' algorithm.adv_estimator=grpo \
    data.train_files=data/gsm8k/train.parquet data.train_batch_size=256 actor_rollout_ref.model.path=Qwen/Qwen2.5-3B-Instruct \
    actor_rollout_ref.rollout.multi_turn.enable=True actor_rollout_ref.rollout.multi_turn.tool_config_path=tools.yaml trainer.total_epochs=15
