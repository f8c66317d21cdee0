#!/bin/bash
# First demonstrations, then rewards: bash examples/sft_then_grpo.sh [FOLDER] [key=value ...]
# The settings are those of both runs, such as training.max_steps=20.
set -euo pipefail
folder=${1:-outputs/sft_then_grpo}
shift || true

python run_training.py algorithm=sft model=random optimizer.learning_rate=2e-3 training.max_steps=300 \
    "$@" hydra.run.dir="$folder/sft"
tunix-lite export checkpoint="$folder/sft" out="$folder/model"
python run_training.py model.weights="$folder/model" "$@" hydra.run.dir="$folder/grpo"
