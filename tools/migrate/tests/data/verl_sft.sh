torchrun --standalone --nnodes=1 --nproc_per_node=8 -m verl.trainer.fsdp_sft_trainer data.train_files=data/gsm8k/train.parquet \
    data.prompt_key=extra_info data.response_key=extra_info optim.lr=1e-4 model.partial_pretrain=google/gemma-2b-it trainer.total_epochs=4
