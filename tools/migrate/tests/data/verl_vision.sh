ENGINE=${1:-vllm}
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=data/geo3k/train.parquet data.image_key=images \
    data.train_batch_size=512 actor_rollout_ref.model.path=Qwen/Qwen2.5-VL-7B-Instruct actor_rollout_ref.rollout.name=$ENGINE trainer.total_epochs=15
