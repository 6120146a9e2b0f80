"""Joining of the processes that a launcher has started into one run. Importing this module does not import jax."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

from kvjax.errors import UserError, one_line, warn

ADDRESS, COUNT, INDEX = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
"""The variables that describe the processes to JAX, whatever has started them."""
MPI = {"OMPI_COMM_WORLD_SIZE": "Open MPI", "PMI_SIZE": "MPI"}
"""The variables with which MPI's launchers give the number of processes, and the launchers' names."""


def join_processes(jax: Any) -> tuple[str, int]:
    """Join the other processes of this run, if its launcher has started any. Call it before jax starts.

    `jax.distributed.initialize` finds the processes of TPU pods, Slurm, MPI and indexed jobs of Kubernetes. For
    other launchers, set JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID. JAX_NUM_PROCESSES=1 alone keeps
    a process separate.

    Returns:
        The launcher's name, or "" for a single process; and the number of processes, or 1 if it is not known before
        devices have started.

    Raises:
        UserError: several processes were started but do not find each other.
    """
    env = os.environ
    if jax.distributed.is_initialized():
        return "", jax.process_count()
    if ADDRESS in env:
        variables = {"num_processes": env.get(COUNT), "process_id": env.get(INDEX)}
        arguments = {name: _whole(name, value) for name, value in variables.items() if value is not None}
        return _join(jax, ADDRESS, arguments.get("num_processes", 1), **arguments)
    if env.get(COUNT) == "1":
        return "", 1
    if _is_tpu_pod():
        return _join(jax, "TPU pod", 1)
    if (tasks := _slurm_tasks()) > 1:
        return _join(jax, "Slurm", tasks)
    for variable, name in MPI.items():
        if (count := _number(variable)) > 1:
            return _join_mpi(jax, name, count)
    if "KUBERNETES_SERVICE_HOST" in env and "JOB_COMPLETION_INDEX" in env:
        if not importlib.util.find_spec("kubernetes"):
            raise UserError(
                "the processes of an indexed job find each other with jax's extra: pip install 'jax[k8s]'; "
                f"{COUNT}=1 makes them separate runs"
            )
        return _join(jax, "Kubernetes", 1)
    if _is_tpu_machine():
        try:
            return _join(jax, "TPU pod", 1)
        except _NoClusterError as error:
            if isinstance(error.__cause__, OSError):
                warn(f"no metadata server says whether this is a pod, so this machine runs alone: {error}")
    if (machines := _number("SKYPILOT_NUM_NODES")) > 1:
        raise UserError(
            f"SkyPilot started {machines} machines, which do not know each other: set {ADDRESS}, {COUNT} and {INDEX}"
        )
    return "", 1


class _NoClusterError(UserError):
    """JAX found no cluster."""


def _join_mpi(jax: Any, name: str, count: int) -> tuple[str, int]:
    if "OMPI_MCA_orte_hnp_uri" in os.environ:
        return _join(jax, name, count)
    if not importlib.util.find_spec("mpi4py"):
        raise UserError(
            f"{name} started {count} processes, which find each other with mpi4py: pip install mpi4py"
        )
    return _join(jax, name, count, cluster_detection_method="mpi4py")


def _join(jax: Any, name: str, count: int, **arguments: Any) -> tuple[str, int]:
    try:
        jax.distributed.initialize(**arguments)
    except Exception as error:  # jax and its clients of clusters raise exceptions of any kind
        # without a cluster jax raises ValueError, and a missing metadata server is an OSError
        kind = _NoClusterError if isinstance(error, ValueError | OSError) else UserError
        raise kind(f"{name}: this process does not find the run's others: {one_line(str(error))}") from error
    return name, count


def _whole(name: str, value: str) -> int:
    if not value.isdecimal():
        raise UserError(f"the environment's {name} must be a whole number, got {value!r}")
    return int(value)


def _number(variable: str) -> int:
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() else 0


def _slurm_tasks() -> int:
    """Return the number of tasks of a step that srun started. It is 0 in a job's script or shell, and for processes
    that MPI started within the step."""
    tasks, step_tasks = _number("SLURM_NTASKS"), _number("SLURM_STEP_NUM_TASKS")
    by_mpi = any(_number(variable) not in (0, tasks) for variable in MPI)
    return tasks if "SLURM_STEP_NODELIST" in os.environ and step_tasks in (0, tasks) and not by_mpi else 0


def _is_tpu_pod() -> bool:
    """Return True if the environment names several TPU machines, as on GKE."""
    hosts = os.environ.get("TPU_PROCESS_ADDRESSES") or os.environ.get("TPU_WORKER_HOSTNAMES") or ""
    return "," in hosts or os.environ.get("MEGASCALE_NUM_SLICES", "1") != "1"


def _is_tpu_machine() -> bool:
    """Return True if this may be a machine of a TPU pod: libtpu is installed, and no variable rules out a pod.
    Importing jax sets one of these variables on machines without a TPU."""
    excluding = ("TPU_SKIP_MDS_QUERY", "TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES")
    if any(variable in os.environ for variable in excluding) or not importlib.util.find_spec("libtpu"):
        return False
    return "tpu" in os.environ.get("JAX_PLATFORMS", "tpu")
