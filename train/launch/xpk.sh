#!/bin/bash
# Train on a slice of 16 v5e chips with xpk, in a cluster and with an image of your own:
#   CLUSTER=… IMAGE=… BUCKET=… train/launch/xpk.sh
exec xpk workload create --workload kvjax --cluster "$CLUSTER" --tpu-type v5litepod-16 --docker-image "$IMAGE" \
    --command "python -m kvjax.train --mesh fsdp=2,tensor=8 --config llama-3.1-8b --data $BUCKET/documents --out $BUCKET/runs/llama"
