#!/bin/sh
#SBATCH --job-name=$name
#SBATCH --nodes=$nodes
#SBATCH --ntasks-per-node=$tasks_per_node
#SBATCH --output=%x-%j.log
# So many seconds before the time limit the workers get SIGTERM, and then have the launcher's --shutdown-timeout:
#SBATCH --signal=TERM@60
# Yours to add: --time, --partition, --account, --gpus-per-node.

# All ranks need the same token. srun passes the environment on.
export ASYNCDIST_TOKEN="$${ASYNCDIST_TOKEN:-$$(asyncdist token)}"
${store}exec srun asyncdist run --nproc-per-node $nproc_per_node --max-restarts $max_restarts $command
