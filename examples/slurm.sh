#!/bin/bash
# Train on three nodes of a Slurm cluster: sbatch slurm.sh runner.experiment_name=NAME env=... model=...
# All nodes need the same environment, the same paths, and the same token in ~/.ray/auth_token.
#SBATCH --nodes=3 --ntasks-per-node=1 --cpus-per-task=32 --gpus-per-node=8
#SBATCH --signal=B:TERM@120
export RAY_AUTH_MODE=token
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK # Slurm 22.05 and newer: srun does not inherit --cpus-per-task
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -1)
export RAY_ADDRESS=$first:6379
nodes() { ray status 2>/dev/null | grep -c ' node_'; }

srun --nodes=1 --ntasks=1 -w "$first" ray start --head --port=6379 --block &
until [ "$(nodes)" -ge 1 ]; do sleep 2; done
srun --nodes=2 --ntasks=2 --exclude="$first" ray start --address="$RAY_ADDRESS" --block &
until [ "$(nodes)" -ge 3 ]; do sleep 2; done
srun --overlap --nodes=1 --ntasks=1 -w "$first" embodyrl train launcher=ray cluster.num_nodes=3 \
    "cluster.component_placement={env:1-2,rollout:0,actor:0}" runner.on_existing=resume "$@" &
driver=$!
trap 'kill -TERM $driver' TERM # srun forwards the signal to the training only
wait $driver
wait $driver
