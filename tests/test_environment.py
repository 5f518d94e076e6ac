"""The three ways to install say the same thing, and the package holds the product and nothing of the lab."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

EXTRAS = {
    "gpu": "requirements-gpu.txt",
    "peers": "requirements-peers.txt",
    "dev": "requirements-dev.txt",
}


def lines(path: Path) -> list[str]:
    """Lines of a requirements file that say something."""
    text = [line.split("#")[0].strip() for line in path.read_text().splitlines()]
    return [line for line in text if line]


def own(path: Path) -> list[str]:
    """Requirements of a file, less the files that it includes."""
    return [line for line in lines(path) if not line.startswith("-r")]


def drift(
    requirements: dict[str, list[str]], project: dict, environment: dict, python: str = ">=3.11"
) -> list[str]:
    """What pyproject.toml and environment.yml say otherwise than the requirements files."""
    found = []
    extras = project["project"]["optional-dependencies"]
    if set(extras) != set(EXTRAS):
        found.append(f"extras {sorted(extras)} are not {sorted(EXTRAS)}")
    for extra, file in EXTRAS.items():
        if sorted(extras.get(extra, [])) != sorted(requirements[file]):
            found.append(
                f"extra {extra} and {file}: {sorted(set(extras[extra]) ^ set(requirements[file]))}"
            )
    if project["project"]["requires-python"] != python:
        found.append(f"requires-python is {project['project']['requires-python']}")
    conda = [d for d in environment["dependencies"] if isinstance(d, str)]
    pip = [d["pip"] for d in environment["dependencies"] if isinstance(d, dict)]
    if pip != [["-r requirements.txt"]]:
        found.append(f"environment.yml installs {pip} and not requirements.txt alone")
    if sorted(re.split(r"[<>=]", d)[0] for d in conda) != ["pip", "python"]:
        found.append(f"environment.yml takes {conda} from conda, where only python and pip belong")
    if not any(d.startswith(f"python{python}") for d in conda):
        found.append(f"environment.yml has another Python than {python}")
    return found


@pytest.fixture
def said(repository: Path) -> tuple[dict, dict, dict]:
    requirements = {file: own(repository / file) for file in EXTRAS.values()}
    project = tomllib.loads((repository / "pyproject.toml").read_text())
    environment = yaml.safe_load((repository / "environment.yml").read_text())
    return requirements, project, environment


def test_requirements_pyproject_and_environment_agree(said) -> None:
    assert drift(*said) == []


@pytest.mark.parametrize("edit", ["extra", "pin", "conda", "pip"])
def test_a_drift_is_seen(said, edit: str) -> None:
    requirements, project, environment = said
    if edit == "extra":
        del project["project"]["optional-dependencies"]["peers"]
        project["project"]["optional-dependencies"]["pears"] = []
        with pytest.raises(KeyError):
            drift(requirements, project, environment)
        return
    if edit == "pin":
        requirements["requirements-gpu.txt"][0] += ".1"
    if edit == "conda":
        environment["dependencies"].append("numpy")
    if edit == "pip":
        environment["dependencies"][-1]["pip"].append("scipy")
    assert len(drift(requirements, project, environment)) == 1


def test_every_requirement_is_pinned(repository: Path) -> None:
    for path in repository.glob("requirements*.txt"):
        for requirement in own(path):
            assert re.fullmatch(r"[A-Za-z0-9_.-]+(\[[a-z0-9,]+\])?==[0-9.]+", requirement), (
                f"{path.name}: {requirement}"
            )


def test_files_include_each_other(repository: Path) -> None:
    included = {
        path.name: [line for line in lines(path) if line.startswith("-r")]
        for path in repository.glob("requirements*.txt")
    }
    assert included == {
        "requirements.txt": [],
        "requirements-dev.txt": ["-r requirements.txt"],
        "requirements-gpu.txt": ["-r requirements.txt"],
        "requirements-peers.txt": ["-r requirements-gpu.txt"],
        "requirements-accuracy.txt": ["-r requirements.txt"],
    }


def test_library_numpy_range_admits_the_pin(repository: Path) -> None:
    from packaging.requirements import Requirement

    project = tomllib.loads((repository / "pyproject.toml").read_text())["project"]
    (library,) = map(Requirement, project["dependencies"])
    (pin,) = [
        Requirement(r) for r in own(repository / "requirements.txt") if r.startswith("numpy==")
    ]
    assert library.name == "numpy"
    assert library.specifier.contains(next(iter(pin.specifier)).version)


def test_installed_versions_are_the_pins(repository: Path) -> None:
    from importlib.metadata import version

    from packaging.requirements import Requirement

    for file in ("requirements.txt", "requirements-dev.txt"):
        for requirement in map(Requirement, own(repository / file)):
            assert requirement.specifier.contains(version(requirement.name)), str(requirement)


@pytest.fixture(scope="module")
def wheel(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Names in the wheel, built from a copy: setuptools leaves folders behind."""
    root = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(repository / name, root / name)
    shutil.copytree(repository / "kernels", root / "kernels")
    shutil.copytree(repository / "workflow", root / "workflow")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        ".",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        "out",
        "-q",
    ]
    subprocess.run(command, cwd=root, check=True, capture_output=True, text=True)
    (built,) = (root / "out").glob("*.whl")
    return zipfile.ZipFile(built).namelist()


def test_wheel_holds_the_package_with_its_cuda_sources(repository: Path, wheel: list[str]) -> None:
    package = repository / "kernels"
    sources = [
        p for p in (package / "qgemm_mx").rglob("*") if p.suffix in (".py", ".cu", ".cuh", ".json")
    ]
    assert {p.relative_to(package).as_posix() for p in sources} <= set(wheel)
    assert any(name.endswith(".cu") for name in wheel)


def test_wheel_holds_nothing_else(wheel: list[str]) -> None:
    assert {name.split("/")[0].split("-")[0] for name in wheel} == {"qgemm_mx"}


def code_lines(text: str) -> list[str]:
    """Lines of a shell script or block that do something."""
    return [
        line.strip()
        for line in text.splitlines()
        if line.strip() and not line.lstrip().startswith("#")
    ]


def test_ci_runs_the_readme_test_command_and_nothing_else(repository: Path) -> None:
    blocks = re.findall(r"```sh\n(.*?)```", (repository / "README.md").read_text(), flags=re.S)
    (command,) = [
        line for block in blocks for line in code_lines(block) if line.endswith("&& pytest")
    ]
    script = repository / ".ci" / "run"
    assert code_lines(script.read_text()) == [
        "set -euo pipefail",
        'cd "$(dirname "$0")/.."',
        command,
    ]
    assert script.stat().st_mode & 0o100


def test_readme_report_command(repository: Path) -> None:
    command = (
        "python3 -m venv .venv && . .venv/bin/activate && "
        "pip install -r requirements.txt && snakemake --cores all"
    )
    assert command in (repository / "README.md").read_text()


def test_no_two_test_files_share_a_name(repository: Path) -> None:
    """Pytest imports test files by their basename: the second of one name would be an error, or never run."""
    names = [path.name for path in repository.glob("tests/**/test_*.py")]
    assert len(names) == len(set(names)), sorted({n for n in names if names.count(n) > 1})
