#!/bin/bash
# One launcher per machine, one process per GPU:  sbatch examples/slurm.sh --model Qwen/Qwen2.5-0.5B
# Submit from the repository's root. The layout is in examples/multi_node.yaml; sizes of the job come from SLURM.
#SBATCH --job-name=hf-megatron
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --output=%x-%j.out

set -euo pipefail

MAIN_PROCESS_IP=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# Two jobs may share a machine: the port follows from the job.
MAIN_PROCESS_PORT=$((20000 + SLURM_JOB_ID % 20000))
GPUS=${SLURM_GPUS_ON_NODE:-8}
export MAIN_PROCESS_IP MAIN_PROCESS_PORT GPUS

# SLURM_NODEID is known inside the task only, so the task's own shell expands it. A failed machine ends the job:
# the others would otherwise wait for it until the collectives' time limit.
srun --kill-on-bad-exit=1 bash -c 'exec accelerate launch \
    --config_file examples/multi_node.yaml \
    --num_machines "$SLURM_NNODES" \
    --num_processes "$((SLURM_NNODES * GPUS))" \
    --machine_rank "$SLURM_NODEID" \
    --main_process_ip "$MAIN_PROCESS_IP" \
    --main_process_port "$MAIN_PROCESS_PORT" \
    examples/train.py "$@"' train "$@"
