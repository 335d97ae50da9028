# Dr.GRPO: no deviation, a constant denominator
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo algorithm.norm_adv_by_std_in_grpo=False \
    data.train_files="['data/math/train.parquet']" data.val_files="['data/math/test.parquet']" data.train_batch_size=96 \
    data.max_prompt_length=1024 data.max_response_length=2048 actor_rollout_ref.model.path=models/Qwen2.5-Math-7B \
    actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm actor_rollout_ref.actor.use_kl_loss=False \
    actor_rollout_ref.actor.ppo_mini_batch_size=96 actor_rollout_ref.actor.clip_ratio=0.3 \
    actor_rollout_ref.actor.optim.lr=5e-7 actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=8 \
    trainer.total_training_steps=300 trainer.test_freq=16
