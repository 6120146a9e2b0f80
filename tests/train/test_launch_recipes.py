"""Test that the launch recipes parse, and that their commands are commands of kvjax."""

import ast
import re
import shlex
import subprocess

import pytest
import yaml

from kvjax.cli.launch import MeshShape
from kvjax.evaluate.config import parse as parse_evaluate
from kvjax.train.config import parse
from tests.processes import ROOT

LAUNCH = ROOT / "train" / "launch"
SCRIPTS = sorted(LAUNCH.glob("*.sh"))
PAGE = ROOT / "docs" / "several-machines.md"
COMMAND = re.compile(r"python -m kvjax\.(train|evaluate) ([^\n`]*)")


def commands(text):
    """Yield the complete commands of kvjax in a text: the module, and the arguments without the caller's own."""
    for module, line in COMMAND.findall(text):
        if "…" not in line:
            line = line.removesuffix('"') if line.count('"') % 2 else line
            yield module, [word for word in shlex.split(line) if word != "$@"]


@pytest.mark.parametrize("file", [*SCRIPTS, *sorted(LAUNCH.glob("*.yaml")), PAGE], ids=lambda x: x.name)
def test_every_command_parses(file):
    found_commands = list(commands(file.read_text()))
    assert found_commands
    for module, arguments in found_commands:
        if module == "evaluate":
            assert parse_evaluate(arguments)
        elif "--resume" not in arguments:
            assert parse(
                ["--config", "llama-3.1-8b", *arguments] if "--config" not in arguments else arguments
            )


@pytest.mark.parametrize("file", SCRIPTS, ids=lambda x: x.name)
def test_scripts_are_valid_bash(file):
    subprocess.run(["bash", "-n", file], check=True)


def test_slurm_starts_a_process_for_each_device_of_its_mesh():
    text = (LAUNCH / "slurm.sh").read_text()
    options = dict(re.findall(r"#SBATCH --(\S+)=(\d+)$", text, re.M))
    nodes, tasks, gpus = (int(options[name]) for name in ("nodes", "ntasks-per-node", "gpus-per-node"))
    assert tasks == gpus
    assert MeshShape.parse(re.search(r"--mesh (\S+)", text)[1]).count == nodes * gpus


def test_the_jobset_has_the_chips_of_its_mesh():
    (jobs,) = yaml.safe_load((LAUNCH / "gke.yaml").read_text())["spec"]["replicatedJobs"]
    job = jobs["template"]["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    chips = job["parallelism"] * container["resources"]["limits"]["google.com/tpu"]
    assert job["parallelism"] == job["completions"]
    assert pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"] == "4x4"
    assert chips == 16
    assert (
        MeshShape.parse(re.search(r"--mesh (\S+)", container["command"][2])[1]).count
        == chips * jobs["replicas"]
    )


def test_skypilot_passes_its_machines_to_jax():
    job = yaml.safe_load((LAUNCH / "skypilot.yaml").read_text())
    subprocess.run(["bash", "-n"], input=job["run"], text=True, check=True)
    script = job["run"].partition("if [")[0] + "env"
    env = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1"}
    env |= {"PATH": "/usr/bin:/bin"}
    output = subprocess.run(
        ["bash", "-c", script], env=env, capture_output=True, text=True, check=True
    ).stdout
    variables = dict(line.split("=", 1) for line in output.splitlines() if line.startswith("JAX_"))
    assert variables == {
        "JAX_COORDINATOR_ADDRESS": "10.0.0.1:8476",
        "JAX_NUM_PROCESSES": "2",
        "JAX_PROCESS_ID": "1",
    }


def test_ray_calls_the_command():
    tree = ast.parse((LAUNCH / "ray_tpu.py").read_text())
    names = {
        alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert names == {"ScalingConfig", "JaxTrainer", "main"}
