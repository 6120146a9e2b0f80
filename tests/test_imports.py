"""The dependency rule: which package may import which, read from the sources without importing them."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

LAYERS = (
    {
        "kvjax.chat_template",
        "kvjax.chat_worker",
        "kvjax.errors",
        "kvjax.files",
        "kvjax.struct",
        "kvjax.mesh",
        "kvjax.step",
        "kvjax.top",
        "kvjax.builtin",
    },
    {"kvjax.command", "kvjax.exported", "kvjax.plugins"},
    {"kvjax.cache", "kvjax.policies"},
    {"kvjax.models"},
    {"kvjax.inference", "kvjax.tasks"},
    {"kvjax.train", "kvjax.evaluate", "kvjax.generate", "kvjax.convert", "kvjax.plan", "kvjax.export"},
    {"kvjax.__main__"},
)
"""Lowest first. A module imports its own layer and those below it."""

POLICIES_MAY_IMPORT = {
    *(
        "kvjax.builtin",
        "kvjax.chat_template",
        "kvjax.chat_worker",
        "kvjax.errors",
        "kvjax.exported",
        "kvjax.files",
        "kvjax.struct",
        "kvjax.mesh",
        "kvjax.plugins",
        "kvjax.step",
        "kvjax.top",
    ),
    "kvjax.policies",
}
CACHE_MAY_IMPORT = POLICIES_MAY_IMPORT - {"kvjax.policies"} | {"kvjax.cache"}
KERNELS_MAY_IMPORT = {"jax", "jaxtyping", "numpy", "pallas_kernels"}
"""numpy comes with jax."""


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


LIBRARY = [path for path in sources("kvjax") if path.parent.name != "kvjax" or path.name != "__init__.py"]
"""All but the package's own `__init__`, which names everything (lazily)."""


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports(path: Path) -> Iterator[str]:
    """Dotted names that a file imports, anywhere in it; `from a import b` gives both `a` and `a.b`."""
    package = module_name(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join(base + ([node.module] if node.module else []))
            yield source
            yield from (f"{source}.{alias.name}" for alias in node.names)


def within(name: str, packages: set[str]) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def layer(name: str) -> int | None:
    """The layer of a module: that of the longest package listed in `LAYERS` which holds it."""
    holders = [
        (len(p), index) for index, packages in enumerate(LAYERS) for p in packages if within(name, {p})
    ]
    return max(holders)[1] if holders else None


@pytest.mark.parametrize("path", LIBRARY, ids=module_name)
def test_imports_only_from_its_layer_and_below(path):
    own = layer(module_name(path))
    assert own is not None, f"{module_name(path)} stands in no layer: name its package in LAYERS"
    above = {name for name in imports(path) if (other := layer(name)) is not None and other > own}
    assert not above, f"{module_name(path)} imports upwards: {sorted(above)}"


def outside(path: Path, allowed: set[str]) -> set[str]:
    """The modules of kvjax that a file imports and may not."""
    ours = {name for name in imports(path) if within(name, {"kvjax"})}
    return {name for name in ours if not within(name, allowed)} - {"kvjax"}


@pytest.mark.parametrize("path", sources("kvjax/policies"), ids=module_name)
def test_policies_know_no_model_and_no_cache(path):
    assert not outside(path, POLICIES_MAY_IMPORT)


METHODS = [
    path for role in ("admission", "eviction", "selection") for path in sources(f"kvjax/policies/{role}")
]


@pytest.mark.parametrize("path", METHODS, ids=module_name)
def test_a_method_writes_no_sharding(path):
    """But gates and scorers, modules with parameters, which say beside each how it is split."""
    placing = {"kvjax.mesh.put", "kvjax.mesh.P", "kvjax.mesh.BATCH", "jax.sharding.PartitionSpec"}
    folders = "admission.wgkv", "admission.kvpop", "eviction.fast_kvzip"
    gates = tuple(f"kvjax.policies.{folder}." for folder in folders)
    allowed = placing if module_name(path).startswith(gates) else set()
    assert not set(imports(path)) & placing - allowed
    assert allowed or "out_sharding" not in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("path", sources("kvjax/cache"), ids=module_name)
def test_the_cache_knows_no_policy_and_no_model(path):
    command = {"kvjax.command"} if path.name == "__main__.py" else set()
    assert not outside(path, CACHE_MAY_IMPORT | command)


@pytest.mark.parametrize("path", sources("kvjax/models"), ids=module_name)
def test_models_know_only_the_policy_type(path):
    stray = {
        name
        for name in imports(path)
        if within(name, {"kvjax.policies", "kvjax.cache", "kvjax.inference.attention"})
    }
    assert stray <= {
        "kvjax.policies",
        "kvjax.policies.Policy",
        "kvjax.policies.policy",
        "kvjax.policies.policy.Policy",
    }


@pytest.mark.parametrize("path", sources("pallas_kernels"), ids=module_name)
def test_kernels_stand_alone(path):
    stray = {
        name
        for name in imports(path)
        if name.split(".")[0] not in KERNELS_MAY_IMPORT | sys.stdlib_module_names
    }
    assert not stray, f"{module_name(path)} imports {sorted(stray)}"


@pytest.mark.parametrize("path", [*sources("kvjax"), *sources("pallas_kernels")], ids=module_name)
def test_the_packages_use_no_program_of_the_repository(path):
    stray = {name for name in imports(path) if name.split(".")[0] in {"train", "infer", "tests"}}
    assert not stray, f"{module_name(path)} imports {sorted(stray)}, which the wheel does not install"


@pytest.mark.parametrize("path", sources("tests"), ids=module_name)
def test_tests_import_nothing_from_tests(path):
    """What several of them share stands in a file of its own."""
    shared = {name for name in imports(path) if name.startswith("tests.") and ".test_" in name}
    assert not shared, f"{module_name(path)} imports from {sorted(shared)}"
