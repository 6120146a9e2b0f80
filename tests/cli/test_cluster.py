"""Tests of joining the processes of a run, which find each other through their launcher's variables."""

import os
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest

from kvjax.cli import cluster
from kvjax.errors import UserError

SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_NODELIST": "localhost",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "1",
}
EXPLICIT = {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}
LAUNCHERS = ("JAX_", "TPU_", "SLURM_", "OMPI_", "PMI_", "SKYPILOT_", "KUBERNETES_", "JOB_", "MEGASCALE_")
GKE = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "0"}


class Jax:
    """A stand-in for jax, as far as `join_processes` uses it."""

    def __init__(self, error=None):
        self.calls, self._error = [], error
        self.distributed = SimpleNamespace(is_initialized=lambda: False, initialize=self._initialize)

    def _initialize(self, **arguments):
        self.calls.append(arguments)
        if self._error is not None:
            raise self._error


@pytest.fixture
def joined(monkeypatch):
    """Return a function that calls `join_processes` in an environment with only the given launcher variables."""
    installed = set()
    monkeypatch.setattr(cluster.importlib.util, "find_spec", installed.__contains__)

    def join(env, *, error=None, modules=()):
        installed.update(modules)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
        monkeypatch.setattr(cluster.os, "environ", kept | env)
        jax = Jax(error)
        return cluster.join_processes(jax), jax.calls

    return join


@pytest.mark.parametrize(
    ("env", "found", "calls"),
    [
        ({}, ("", 1), []),
        (EXPLICIT, ("JAX_COORDINATOR_ADDRESS", 2), [{"num_processes": 2, "process_id": 1}]),
        (SLURM, ("Slurm", 2), [{}]),
        (SLURM | EXPLICIT, ("JAX_COORDINATOR_ADDRESS", 2), [{"num_processes": 2, "process_id": 1}]),
        ({name: value for name, value in SLURM.items() if name != "SLURM_STEP_NODELIST"}, ("", 1), []),
        (SLURM | {"SLURM_NTASKS": "1"}, ("", 1), []),
        (
            {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_MCA_orte_hnp_uri": "4096.0;tcp://10.0.0.1:1"},
            ("Open MPI", 4),
            [{}],
        ),
        ({"PMI_SIZE": "4"}, ("MPI", 4), [{"cluster_detection_method": "mpi4py"}]),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, ("TPU pod", 1), [{}]),
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, ("", 1), []),
        (GKE | {"TPU_WORKER_HOSTNAMES": "a", "MEGASCALE_NUM_SLICES": "2"}, ("TPU pod", 1), [{}]),
        (GKE, ("Kubernetes", 1), [{}]),
        (GKE | {"JAX_NUM_PROCESSES": "1"}, ("", 1), []),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "1"}, ("", 1), []),
        (SLURM | {"PMI_SIZE": "2"}, ("Slurm", 2), [{}]),
        (SLURM | {"PMI_SIZE": "16"}, ("MPI", 16), [{"cluster_detection_method": "mpi4py"}]),
        ({"TPU_WORKER_HOSTNAMES": "a,b", "SKYPILOT_NUM_NODES": "2"}, ("TPU pod", 1), [{}]),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, ("", 1), []),
    ],
)
def test_processes_are_joined_by_the_launchers_variables(env, found, calls, joined):
    assert joined(env, modules=["mpi4py", "kubernetes"]) == (found, calls)


def test_tpu_machine_tries_to_join_a_pod(joined):
    assert joined({}, modules=["libtpu"]) == (("TPU pod", 1), [{}])
    assert joined({"TPU_SKIP_MDS_QUERY": "1"}, modules=["libtpu"]) == (("", 1), [])
    assert joined({"JAX_PLATFORMS": "cpu"}, modules=["libtpu"]) == (("", 1), [])
    assert joined({}, modules=["libtpu"], error=ValueError("no address")) == (("", 1), [{}])
    with pytest.warns(UserWarning, match="so this machine runs alone: TPU pod: .*: no metadata"):
        assert joined({}, modules=["libtpu"], error=OSError("no metadata")) == (("", 1), [{}])
    with pytest.raises(UserError, match="TPU pod: this process does not find the run's others: the network"):
        joined({}, modules=["libtpu"], error=RuntimeError("the network"))


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (SLURM, "Slurm: this process does not find the run's others: nobody is there"),
        ({"PMI_SIZE": "4"}, "MPI started 4 processes, which find each other with mpi4py: pip install mpi4py"),
        (
            {"SKYPILOT_NUM_NODES": "2"},
            "SkyPilot started 2 machines, which do not know each other: set JAX_COORDINATOR_ADDRESS",
        ),
        (GKE, r"with jax's extra: pip install 'jax\[k8s\]'; JAX_NUM_PROCESSES=1 makes them separate runs"),
    ],
)
def test_processes_that_do_not_find_each_other_raise(env, message, joined):
    with pytest.raises(UserError, match=message):
        joined(env, error=RuntimeError("nobody is there"))


def started(mesh):
    """Call `start` with a mesh in two Slurm processes with one device each, and return their output."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        env = (
            os.environ
            | SLURM
            | {"JAX_COORDINATOR_PORT": str(free.getsockname()[1]), "JAX_NUM_CPU_DEVICES": "1"}
        )
    code = f"from kvjax.cli.launch import *; print(start(MeshShape.parse({mesh!r})).size)"
    processes = [
        subprocess.Popen([sys.executable, "-c", code], env=env | index, stdout=-1, stderr=-1, text=True)
        for index in ({"SLURM_PROCID": x, "SLURM_LOCALID": x} for x in "01")
    ]
    return [process.communicate(timeout=100) for process in processes]


@pytest.mark.slow
def test_two_slurm_processes_form_one_mesh():
    first, second = started("2")
    assert first == (
        "2\n",
        "Slurm: 2 processes, 2 devices.\nNo accelerator is used: 2 virtual CPU devices.\n",
    )
    assert second == ("2\n", "")


@pytest.mark.slow
def test_mesh_must_use_devices_of_every_process():
    message = "--mesh 1 uses 1 of the 2 devices, and no device of some of the 2 processes"
    assert all(message in errors for _, errors in started("1"))
