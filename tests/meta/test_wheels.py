"""The packages as a user gets them: wheels, and what their extras ask for."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement

pytestmark = pytest.mark.slow
PACKAGES = ("ps-core", "ps-kernels", "ps-dist", "ps-models")
SOURCES = (".py", ".typed", ".h", ".c", ".cu")


def pip(*arguments: str | Path, python: str | Path = sys.executable) -> str:
    done = subprocess.run(
        [python, "-m", "pip", "--disable-pip-version-check", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheelhouse(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All four wheels, built by the backend that is installed here."""
    folder = tmp_path_factory.mktemp("wheelhouse")
    sources = [root / "packages" / package for package in PACKAGES]
    pip("wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, *sources)
    return folder


def wheel(wheelhouse: Path, package: str) -> Path:
    (found,) = wheelhouse.glob(f"{package.replace('-', '_')}-*.whl")
    return found


def requirements(wheelhouse: Path, package: str, extra: str = "") -> set[str]:
    """What a wheel's own metadata asks for, with an extra."""
    with zipfile.ZipFile(wheel(wheelhouse, package)) as archive:
        (name,) = (each for each in archive.namelist() if each.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(name).decode())
    asked = [Requirement(line) for line in metadata.get_all("Requires-Dist", [])]
    environment = {**default_environment(), "extra": extra}
    return {
        f"{each.name}{'[' + ','.join(sorted(each.extras)) + ']' if each.extras else ''}{each.specifier}"
        for each in asked
        if each.marker is None or each.marker.evaluate(environment)
    }


EXTRAS = [
    ("ps-core", "", set()),
    ("ps-core", "torch", {"torch>=2.11", "ps-kernels=={}"}),
    ("ps-core", "cuda", {"torch>=2.11", "ps-kernels[cuda13]=={}"}),
    ("ps-core", "cuda12", {"torch>=2.11", "ps-kernels[cuda12]=={}"}),
    ("ps-kernels", "", set()),
    ("ps-kernels", "numpy", {"numpy>=1.26"}),
    ("ps-kernels", "torch", {"torch>=2.11"}),
    ("ps-kernels", "cuda12", {"cupy-cuda12x>=14"}),
    ("ps-kernels", "cuda13", {"cupy-cuda13x>=14"}),
    ("ps-dist", "", {"ps-core=={}", "torch>=2.11"}),
    ("ps-models", "", {"ps-core[torch]=={}", "torch>=2.11"}),
    ("ps-models", "hf", {"ps-core[torch]=={}", "torch>=2.11", "transformers>=5", "safetensors>=0.5"}),
    (
        "ps-models",
        "lora",
        {"ps-core[torch]=={}", "torch>=2.11", "peft>=0.18", "transformers>=5", "safetensors>=0.5"},
    ),
    ("ps-models", "train", {"ps-core[torch]=={}", "torch>=2.11", "tokenizers>=0.20"}),
    (
        "ps-models",
        "all",
        {
            *("ps-core[torch]=={}", "torch>=2.11", "ps-dist=={}"),
            *("transformers>=5", "safetensors>=0.5", "tokenizers>=0.20"),
        },
    ),
]


@pytest.mark.parametrize(("package", "extra", "wanted"), EXTRAS, ids=[f"{name}[{extra}]" for name, extra, _ in EXTRAS])
def test_what_each_extra_asks_for(wheelhouse: Path, package: str, extra: str, wanted: set[str]) -> None:
    version = wheel(wheelhouse, package).name.split("-")[1]
    assert requirements(wheelhouse, package, extra) == {line.format(version) for line in wanted}


@pytest.mark.parametrize("package", PACKAGES)
def test_what_a_wheel_holds(root: Path, wheelhouse: Path, package: str) -> None:
    """The whole package and nothing beside it."""
    module = package.replace("-", "_")
    source = root / "packages" / package / "src"
    wanted = {str(path.relative_to(source)) for path in source.rglob("*") if path.suffix in SOURCES}
    with zipfile.ZipFile(wheel(wheelhouse, package)) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
        scripts = [archive.read(name).decode() for name in archive.namelist() if name.endswith("entry_points.txt")]
        licences = [name for name in archive.namelist() if name.endswith("licenses/LICENSE")]
    assert f"{module}/py.typed" in wanted
    assert held == wanted
    assert wheel(wheelhouse, package).name.endswith("-py3-none-any.whl"), (
        "for every machine, with or without a compiler"
    )
    assert len(licences) == 1
    commands = {"ps-core": "pstar = ps_core.cli:main", "ps-models": "pstar-train = ps_models.train:main"}
    wanted_scripts = [f"[console_scripts]\n{commands[package]}"] if package in commands else []
    assert [text.strip() for text in scripts] == wanted_scripts


def test_building_leaves_nothing_in_the_sources(root: Path, wheelhouse: Path) -> None:
    assert wheel(wheelhouse, "ps-kernels").is_file()
    told = ["git", "status", "--porcelain", "--ignored", "packages"]
    listed = subprocess.run(told, cwd=root, capture_output=True, text=True, check=True).stdout.splitlines()
    made = [line for line in listed if re.search(r"/(build|dist)/|\.(so|o|egg-info/?)$", line)]
    assert not made


@pytest.mark.parametrize(
    "wanted", ["ps-core[torch]", "ps-kernels[numpy,torch]", "ps-dist", "ps-models", "ps-models[all]"]
)
def test_an_extra_resolves_from_the_wheelhouse(root: Path, wheelhouse: Path, wanted: str) -> None:
    """With torch and numpy installed already, the wheelhouse alone has all that is left."""
    constraints = root / "constraints.txt"
    pip("install", "--dry-run", "--no-index", "--find-links", wheelhouse, "-c", constraints, wanted)


def test_the_core_installs_alone_and_brings_nothing(wheelhouse: Path, tmp_path: Path) -> None:
    """In an environment of its own, from the wheel, without any index."""
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    python = tmp_path / "venv" / ("Scripts" if sys.platform == "win32" else "bin") / "python"
    pip("install", "--quiet", "--no-index", wheel(wheelhouse, "ps-core"), python=python)
    listed = {line.partition("==")[0].lower() for line in pip("list", "--format=freeze", python=python).splitlines()}
    assert listed - {"pip", "setuptools"} == {"ps-core"}
    helped = subprocess.run([python.with_name("pstar"), "--help"], capture_output=True, text=True, check=False)
    assert helped.returncode == 0, helped.stderr
    assert "plan" in helped.stdout
