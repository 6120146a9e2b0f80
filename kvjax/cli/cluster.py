"""The processes of a run: found as their launcher tells of them. Importing this imports no jax."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

from kvjax.errors import UserError, one_line, warn

OWN = "JAX_COORDINATOR_ADDRESS"
"""The variable that tells of the processes whatever has started them, beside JAX_NUM_PROCESSES and JAX_PROCESS_ID."""
COUNTS = {
    "SLURM_NTASKS": "Slurm",
    "OMPI_COMM_WORLD_SIZE": "Open MPI",
    "PMI_SIZE": "MPI",
    "SKYPILOT_NUM_NODES": "SkyPilot",
    "WORLD_SIZE": "torchrun",
}
"""The variables in which launchers write the number of processes, with the launchers' names."""


def join_processes(jax: Any) -> tuple[str, int]:
    """Join the other processes of this run, if its launcher has started any. jax must not have started.

    What `jax.distributed.initialize` finds is Slurm, MPI, TPU pods and the indexed jobs of Kubernetes.

    Returns:
        the launcher's name, "" where there is one process; and the number of processes, 1 where it is not known before
        devices have started.

    Raises:
        UserError: several processes were started, and they do not find each other.
    """
    env = os.environ
    if jax.distributed.is_initialized():
        return "", jax.process_count()
    if OWN in env:
        named = {name: env.get(f"JAX_{name.upper()}") for name in ("num_processes", "process_id")}
        given = {name: int(value) for name, value in named.items() if value is not None}
        return _join(jax, OWN, given.get("num_processes", 1), **given)
    counts = {variable: int(env[variable]) for variable in COUNTS if env.get(variable, "").isdecimal()}
    if "SLURM_STEP_NODELIST" not in env:
        # a shell or a batch script of Slurm's, outside srun: there is one process, whatever the job's tasks
        counts.pop("SLURM_NTASKS", None)
    for variable, count in counts.items():
        if count > 1:
            return _join_counted(jax, variable, count)
    if _is_tpu_pod():
        return _join(jax, "TPU pod", 1)
    if "KUBERNETES_SERVICE_HOST" in env and "JOB_COMPLETION_INDEX" in env:
        return _join(jax, "Kubernetes", 1)
    if _is_tpu_machine():
        try:
            # Google's metadata server knows whether this machine is one of a pod's
            return _join(jax, "TPU pod", 1)
        except UserError as error:
            warn(f"this machine is taken to stand alone: {error}")
    return "", 1


def _join_counted(jax: Any, variable: str, count: int) -> tuple[str, int]:
    """Join so many processes, of which a variable told."""
    name = COUNTS[variable]
    if name == "Slurm" or "OMPI_MCA_orte_hnp_uri" in os.environ:
        return _join(jax, name, count)
    if "MPI" in name:
        if not importlib.util.find_spec("mpi4py"):
            raise UserError(
                f"{name} started {count} processes, which find each other with mpi4py: pip install mpi4py"
            )
        return _join(jax, name, count, cluster_detection_method="mpi4py")
    raise UserError(
        f"{name} started {count} processes ({variable}), which do not know each other: set {OWN}, "
        "JAX_NUM_PROCESSES and JAX_PROCESS_ID"
    )


def _join(jax: Any, name: str, count: int, **given: Any) -> tuple[str, int]:
    try:
        jax.distributed.initialize(**given)
    except Exception as error:  # jax, its clients of clusters and their networks raise whatever they like
        raise UserError(
            f"{name}: this process does not find the run's others: {one_line(str(error))}"
        ) from None
    return name, count


def _is_tpu_pod() -> bool:
    """Return True if the environment names several TPU machines, as on GKE."""
    hosts = os.environ.get("TPU_PROCESS_ADDRESSES") or os.environ.get("TPU_WORKER_HOSTNAMES") or ""
    return "," in hosts or os.environ.get("MEGASCALE_NUM_SLICES", "1") != "1"


def _is_tpu_machine() -> bool:
    """Return True if jax, which has been imported, found TPU chips, and nothing says that the machine stands alone."""
    alone = ("TPU_SKIP_MDS_QUERY", "TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES")
    if any(variable in os.environ for variable in alone) or not importlib.util.find_spec("libtpu"):
        return False
    return "tpu" in os.environ.get("JAX_PLATFORMS", "tpu")


__all__ = ["join_processes"]
