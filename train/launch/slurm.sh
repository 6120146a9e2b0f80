#!/bin/bash
# Train on two machines of eight GPUs each; run it where a login node sees the project's folder:
#   sbatch train/launch/slurm.sh --config llama-3.1-8b --data documents/
#SBATCH --job-name=kvjax
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@300
#SBATCH --requeue

# JAX takes one GPU for each of Slurm's tasks. SIGTERM, five minutes before the end, saves the run. The same command
# resumes it.
OUT=runs/llama
. .venv/bin/activate
if [ -e "$OUT/config.yaml" ]; then
    exec srun python -m kvjax.train --resume --out "$OUT"
fi
exec srun python -m kvjax.train --mesh fsdp=2,tensor=8 --out "$OUT" "$@"
