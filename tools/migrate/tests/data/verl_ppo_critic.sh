set -x
python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=gae \
    data.train_files=$HOME/data/gsm8k/train.parquet data.val_files=$HOME/data/gsm8k/test.parquet \
    data.train_batch_size=512 data.max_prompt_length=512 data.max_response_length=256 \
    actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B actor_rollout_ref.actor.ppo_mini_batch_size=128 \
    critic.optim.lr=1e-5 critic.model.path=Qwen/Qwen2.5-0.5B critic.ppo_micro_batch_size_per_gpu=8 \
    trainer.total_epochs=10 $@
