"""Train on a slice of 16 TPU v6e chips of a Ray cluster, whose machines have kvjax and Ray 2.49 or newer:

ray job submit -- python train/launch/ray_tpu.py --mesh fsdp=2,tensor=8 --config llama-3.1-8b --data … --out …
"""

import sys

from ray.train import ScalingConfig  # pyright: ignore[reportMissingImports]
from ray.train.v2.jax import JaxTrainer  # pyright: ignore[reportMissingImports]

from kvjax.train.__main__ import main

if __name__ == "__main__":
    slice_of_16 = ScalingConfig(
        use_tpu=True,
        num_workers=4,
        resources_per_worker={"TPU": 4},
        topology="4x4",
        accelerator_type="TPU-V6E",
    )
    config = {"args": sys.argv[1:]}
    JaxTrainer(lambda loop: main(loop["args"]), train_loop_config=config, scaling_config=slice_of_16).fit()
