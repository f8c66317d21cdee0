#!/bin/bash
# One process on each of these machines, over ssh; the first is process 0:
#   HOSTS="gpu1 gpu2" bash examples/launch/ssh.sh model=gemma3_1b 'model.mesh_shape=[[16,1],[fsdp,tp]]'
# All have the checkout, with its .venv, in the folder that this is started from, and ssh asks for no password.
# Ctrl-C ends all of them at once; what was saved is there, and the same hydra.run.dir goes on from it.
set -uo pipefail
read -ra hosts <<< "$HOSTS"
settings=$(printf '%q ' "$@")
started=()
trap 'kill "${started[@]}" 2> /dev/null' INT TERM
for rank in "${!hosts[@]}"; do
    place="MASTER_ADDR=${hosts[0]##*@} MASTER_PORT=${MASTER_PORT:-29500} WORLD_SIZE=${#hosts[@]} RANK=$rank"
    ssh -tt "${hosts[$rank]}" "cd $(printf %q "$PWD") && $place .venv/bin/python run_training.py $settings" < /dev/null &
    started+=($!)
done
code=0
for process in "${started[@]}"; do
    wait "$process" || code=$?
done
exit "$code"
