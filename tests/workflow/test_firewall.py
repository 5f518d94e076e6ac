"""Nothing that builds, checks or measures can reach a prediction: neither by import nor as an input of its rule."""

from __future__ import annotations

import ast
import re
import shutil
from pathlib import Path

import pytest

MEASURING = (
    "build_cubins", "build_testbed", "build_product", "check_sass", "occupancy", "measure_r0", "select_r0",
    "measure_r1", "select_r1", "measure_r2", "select_r2", "accuracy",
)  # fmt: skip
JUDGING = {
    "lab.claims", "lab.registry", "lab.verdicts", "lab.cost_model", "lab.predictions", "lab.scores",
    "lab.audit", "lab.judgement", "lab.report", "lab.readme",
}  # fmt: skip
PREDICTIONS = re.compile(r"prereg/(claims|forecasts|amendments)")
# The one place where a measuring module names them: to forbid them to its own process.
FORBIDDING = "PREDICTION_FOLDERS"


def imports(path: Path) -> set[str]:
    """Modules that a file imports anywhere, inside functions too; every package here is one folder deep."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parts = [path.parent.name] * node.level + [node.module] * (node.module is not None)
            base = ".".join(parts)
            found.add(base)
            found |= {f"{base}.{alias.name}" for alias in node.names}
    return found


def module_file(root: Path, module: str) -> Path | None:
    for folder in ("workflow", "kernels"):
        path = root / folder / Path(*module.split("."))
        for candidate in (path.with_suffix(".py"), path / "__init__.py"):
            if candidate.is_file():
                return candidate
    return None


def reached(root: Path, script: str) -> dict[str, Path]:
    """The script and every module of the project that it can come to import."""
    found = {script: root / "workflow" / "scripts" / f"{script}.py"}
    todo = list(found)
    while todo:
        for module in imports(found[todo.pop()]):
            path = module_file(root, module)
            if path is not None and module not in found:
                found[module] = path
                todo.append(module)
    return found


def named_predictions(path: Path) -> list[str]:
    """Texts in a file's code, docstrings aside, that name a folder of predictions."""
    tree = ast.parse(path.read_text())
    passed_over = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == FORBIDDING:
            passed_over |= {id(child) for child in ast.walk(node)}
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            passed_over.add(id(node.value))
    return [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if id(node) not in passed_over and PREDICTIONS.search(node.value)
    ]


def breaches(root: Path) -> list[str]:
    """Every way from a measuring script to a prediction."""
    found = []
    for script in MEASURING:
        modules = reached(root, script)
        found += [f"{script} reaches {module}" for module in sorted(JUDGING & set(modules))]
        found += [
            f"{script}: {m} names {t}" for m, p in modules.items() for t in named_predictions(p)
        ]
    return found


def test_no_measuring_script_reaches_a_prediction(repository: Path) -> None:
    assert breaches(repository) == []


def test_the_closure_is_followed(repository: Path) -> None:
    assert {"lab.measure", "lab.arms", "lab.records"} <= set(reached(repository, "measure_r0"))
    assert {"lab.testbed", "lab.peer_arm", "lab.counters_r1"} <= set(
        reached(repository, "measure_r1")
    )
    assert {"lab.product_arms", "lab.campaign", "lab.counters_r2"} <= set(
        reached(repository, "measure_r2")
    )
    assert {"lab.audit", "lab.claims", "lab.registry"} <= set(reached(repository, "verdicts"))


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("workflow/lab/arms.py", "from lab import claims"),
        ("workflow/lab/sass.py", "def f():\n    import lab.registry"),
        ("kernels/qgemm_mx/build.py", "X = 'prereg/claims/r0.json'"),
        ("workflow/scripts/measure_r0.py", "from lab.verdicts import judge"),
    ],
)
def test_a_breach_is_seen(repository: Path, tmp_path: Path, file: str, line: str) -> None:
    for folder in ("workflow", "kernels"):
        shutil.copytree(repository / folder, tmp_path / folder)
    with (tmp_path / file).open("a") as module:
        module.write(f"\n{line}\n")
    assert breaches(tmp_path)


def test_cuda_bindings_are_imported_at_the_device_edge_alone(repository: Path) -> None:
    edge = {
        "device", "timing", "bench", "arms", "fp4_arms", "peer_arm", "measure", "launch", "cublaslt",
        "operands", "constants", "counters", "testbed", "campaign", "counters_r1", "product_arms", "host_times",
    }  # fmt: skip
    for path in [*repository.glob("workflow/**/*.py"), *repository.glob("kernels/**/*.py")]:
        gpu = {
            m
            for m in imports(path)
            if m.split(".")[0] in ("cupy", "nvmath") or m == "cuda.bindings"
        }
        assert not gpu or path.stem in edge or path.parent.name == "peers", (
            f"{path.name} imports {sorted(gpu)}"
        )


def test_the_library_never_imports_the_lab(repository: Path) -> None:
    for path in (repository / "kernels").rglob("*.py"):
        assert not {m for m in imports(path) if m.split(".")[0] == "lab"}, path.name


def test_rules_that_build_or_measure_have_no_prediction_as_input(
    repository: Path, checkout
) -> None:
    for name in ("build.smk", "measure.smk"):
        text = (repository / "workflow" / "rules" / name).read_text()
        assert not re.search(r"PREREG_FILES|claims|forecasts|amendments", text), name
    never = ("--config", "measure=never")
    built = checkout.ok("--filegraph", "build", ".work/r0/campaign.json", *never).stdout
    judged = checkout.ok("--filegraph", "reports/verdicts.csv", *never).stdout
    assert "builds.json" in built and not PREDICTIONS.search(built)
    assert PREDICTIONS.search(judged)
