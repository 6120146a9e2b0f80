"""Tests of the dependency rule between packages, read from the sources without importing them."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent

LAYERS = (
    {
        "kvjax.chat_template",
        "kvjax.chat_worker",
        "kvjax.errors",
        "kvjax.files",
        "kvjax.hub",
        "kvjax.struct",
        "kvjax.mesh",
        "kvjax.sampling_params",
        "kvjax.topk",
        "kvjax.builtin",
    },
    {"kvjax.cli", "kvjax.checkpoints", "kvjax.plugins"},
    {"kvjax.cache", "kvjax.policies"},
    {"kvjax.models"},
    {"kvjax.inference", "kvjax.tasks"},
    {"kvjax.engine"},
    {"kvjax.llm", "kvjax.session"},
    {"kvjax.train", "kvjax.evaluate", "kvjax.generate", "kvjax.convert", "kvjax.export", "kvjax.serve"},
    {"kvjax.plan"},
    {"kvjax.__main__"},
)
"""Layers, lowest first. A module may import from its own layer and from those below: the planner imports training, but
training does not import the planner."""

POLICIES_MAY_IMPORT = {
    *(
        "kvjax.builtin",
        "kvjax.chat_template",
        "kvjax.chat_worker",
        "kvjax.errors",
        "kvjax.checkpoints",
        "kvjax.files",
        "kvjax.hub",
        "kvjax.sampling_params",
        "kvjax.struct",
        "kvjax.mesh",
        "kvjax.plugins",
        "kvjax.topk",
    ),
    "kvjax.policies",
}
CACHE_MAY_IMPORT = POLICIES_MAY_IMPORT - {"kvjax.policies"} | {"kvjax.cache"}
KERNELS_MAY_IMPORT = {"jax", "jaxtyping", "numpy", "pallas_kernels"}
"""Packages that kernels may import; numpy comes with jax."""


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


LIBRARY = [path for path in sources("kvjax") if path.parent.name != "kvjax" or path.name != "__init__.py"]
"""All modules but the package's `__init__`, which imports everything lazily."""


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports(path: Path) -> Iterator[str]:
    """Yield the dotted names that a file imports, anywhere in it; `from a import b` gives both `a` and `a.b`."""
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
    """Return the layer of a module, given by the longest package name in `LAYERS` that contains it."""
    holders = [
        (len(p), index) for index, packages in enumerate(LAYERS) for p in packages if within(name, {p})
    ]
    return max(holders)[1] if holders else None


def test_modules_import_only_their_own_layer_and_lower_ones():
    for path in LIBRARY:
        name = module_name(path)
        level = layer(name)
        assert level is not None, f"{name} is in no layer: add its package to LAYERS"
        above = {x for x in imports(path) if (other := layer(x)) is not None and other > level}
        assert not above, f"{name} imports upwards: {sorted(above)}"


def outside(package: str, allowed: set[str]) -> dict[str, set[str]]:
    """Return the modules of kvjax outside `allowed`, by the file of `package` that imports them."""
    violations = {}
    for path in sources(package):
        ours = {name for name in imports(path) if within(name, {"kvjax"})} - {"kvjax"}
        if stray := {name for name in ours if not within(name, allowed)}:
            violations[module_name(path)] = stray
    return violations


def test_policies_import_neither_models_nor_caches():
    assert not outside("kvjax/policies", POLICIES_MAY_IMPORT)


def test_cache_imports_neither_policies_nor_models():
    assert not outside("kvjax/cache", CACHE_MAY_IMPORT)


def test_methods_do_not_write_shardings():
    """Modules with parameters (gates and scorers) are exempt: each states next to a parameter how it is split."""
    placing = {"kvjax.mesh.put", "kvjax.mesh.P", "kvjax.mesh.BATCH", "jax.sharding.PartitionSpec"}
    folders = "admission.wgkv", "admission.kvpop", "admission.kvzap", "eviction.fast_kvzip"
    gates = tuple(f"kvjax.policies.{folder}." for folder in folders)
    for role in ("admission", "eviction", "selection"):
        for path in sources(f"kvjax/policies/{role}"):
            if not module_name(path).startswith(gates):
                assert not set(imports(path)) & placing, module_name(path)
                assert "out_sharding" not in path.read_text(encoding="utf-8"), module_name(path)


def test_models_import_only_policy_types():
    allowed = {
        "kvjax.policies",
        "kvjax.policies.Policy",
        "kvjax.policies.policy",
        "kvjax.policies.policy.Policy",
        "kvjax.policies.views",
        "kvjax.policies.views.Step",
    }
    for path in sources("kvjax/models"):
        others = {"kvjax.policies", "kvjax.cache", "kvjax.inference.attention"}
        stray = {name for name in imports(path) if within(name, others)} - allowed
        assert not stray, f"{module_name(path)} imports {sorted(stray)}"


def test_kernels_import_only_jax():
    for path in sources("pallas_kernels"):
        allowed = KERNELS_MAY_IMPORT | sys.stdlib_module_names
        stray = {name for name in imports(path) if name.split(".")[0] not in allowed}
        assert not stray, f"{module_name(path)} imports {sorted(stray)}"


def test_packages_import_no_programs_of_the_repository():
    for path in [*sources("kvjax"), *sources("pallas_kernels")]:
        stray = {name for name in imports(path) if name.split(".")[0] in {"train", "infer", "tests"}}
        assert not stray, f"{module_name(path)} imports {sorted(stray)}, which the wheel does not install"


def test_tests_do_not_import_test_modules():
    """Helpers that several tests share are in files of their own."""
    for path in sources("tests"):
        shared = {name for name in imports(path) if name.startswith("tests.") and ".test_" in name}
        assert not shared, f"{module_name(path)} imports from {sorted(shared)}"
