"""Every check this project has, on plain venv and pip: ``nox -s tests`` is all that runs on each change."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nox
from nox.command import CommandFailed

nox.needs_version = ">=2024.4.15"
nox.options.default_venv_backend = "venv"
nox.options.reuse_venv = "yes"
nox.options.error_on_missing_interpreters = True
nox.options.sessions = ["tests"]

# nox looks for uv whatever the backend is, and says that it found none.
logging.getLogger("nox").addFilter(lambda record: record.getMessage() != "uv binary not found.")

ROOT = Path(__file__).parent
CORE = ("-e", "packages/ps-core")
PACKAGES = tuple(word for name in ("core", "kernels", "dist", "models") for word in ("-e", f"packages/ps-{name}"))
ALL = (*PACKAGES, "torch", "numpy", "transformers", "safetensors", "accelerate", "peft", "lightning")
"""Without extras: a pip older than 24 does not see that a folder named with extras also is the package itself."""
INTEGRATIONS = ("lightning", "torchmetrics", "trl", "datasets", "ray[train]", "diffusers", "sentence-transformers")
"""Large libraries that only ``integrations`` installs; ``tests`` runs what needs none of them."""
WITHOUT_OTHERS = ("litgpt", "jsonargparse")
"""Installed without what they need: litgpt asks for older versions of packages that transformers has too."""
PYTEST = ("pytest", "hypothesis", "pytest-cov", "pytest-xdist")
SIDE_BY_SIDE = ("--numprocesses=auto", "--maxprocesses=4", "--max-worker-restart=0", "--dist=worksteal")
"""For tests whose tensors are so small that one process leaves most of a machine idle.

A process that ends amid a test is not replaced: its successor would run that test again.
"""
TEST_TIMEOUT = ("-o", "faulthandler_timeout=700", "-o", "faulthandler_exit_on_timeout=true")
"""A test that hangs prints where each thread is, and its process ends."""
BY_FILE = (*SIDE_BY_SIDE[:-1], "--dist=loadfile")
"""For tests of a file that share processes: else each worker starts them. (loadgroup does nothing with pytest 9.2.)"""
TOOLS = ("ruff", "mypy", "import-linter", "nox", "mkdocs-material", "pytest-benchmark", "packaging")
APART = {
    "pure": (),
    "demo": ("--steps", "20", "--eval-every", "10", "--checkpoint-every", "10"),
    "wheels": ("--dry-run",),
}
"""Sessions with environments of their own that ``tests`` runs too, with their arguments: a demo of fewer steps."""
TRAINED = """
import torch
from ps_core import AdamW, Budget
from ps_core.engine import chunked, release
model, optimizer = chunked(torch.nn.Linear(4, 4), AdamW(), device="cpu", budget=Budget(host="1MiB"))
before = model.state_dict()["weight"].clone()
model(torch.ones(2, 4)).sum().backward()
optimizer.step()
assert not torch.equal(before, model.state_dict()["weight"])
release(model)
"""
"""A program that makes one step on the CPU."""
WHEELS_TRIED = (
    ("ps-core[torch]", f"import ps_kernels; assert 'available' in ps_kernels.backends().values(){TRAINED}"),
    ("ps-models[hf]", "import ps_models, ps_core.engine, transformers, safetensors"),
    ("ps-models[all]", "import ps_models.train, ps_dist, ps_core.engine, tokenizers"),
    ("ps-core[cuda]", f"import cupy, ps_kernels; assert 'cuda' in ps_kernels.backends(){TRAINED}"),
)
"""What is installed from the wheels alone, and what runs then; with CuPy too, which downloads 70 MB, without a card."""
NO_NUMPY = "ignore:Failed to initialize NumPy:UserWarning"
"""PyTorch says so where NumPy is not installed, which ps-core does not need."""
BUILD = ("hatchling", "editables")
DOCS = ("mkdocs-material",)
CUDA_TORCH = "torch==2.11.0"
"""The oldest that the engine supports; on Linux its wheel is made for CUDA."""
NEEDED_BY_TORCH = ("filelock", "typing-extensions", "setuptools", "sympy", "networkx", "jinja2", "fsspec", "numpy")
"""Without CUDA's libraries, which have 2 GB."""
NVRTC = tuple(f"{name} ; sys_platform == 'linux'" for name in ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"))
"""CUDA's compilers, which need no device: the newest, and the last that knows sm_70."""


def install(session: nox.Session, *what: str, isolated: bool = False) -> None:
    """One pip call, so that the packages, which no index has, find each other.

    Of what is installed only what is imported is compiled, then. ``isolated``: as users install, with an environment
    of its own for each package's build.
    """
    session.env["PYTHONDONTWRITEBYTECODE"] = None
    if not isolated:
        session.install("--quiet", "-c", "constraints.txt", *BUILD)
        what = ("--no-build-isolation", *what)
    session.install("--quiet", "--no-compile", "-c", "constraints.txt", *what)


def install_once(session: nox.Session, *what: str) -> None:
    """Install as users do, unless this environment has the same already: pip takes long to find that out itself.

    The packages are editable, so only their metadata, the constraints and where they lie decide.
    """
    session.env["PYTHONDONTWRITEBYTECODE"] = None
    files = (ROOT / "constraints.txt", *sorted(ROOT.glob("packages/*/pyproject.toml")))
    told = "\n".join((str(ROOT), *what, *(path.read_text("utf-8") for path in files)))
    wanted, written = hashlib.sha256(told.encode()).hexdigest(), Path(session.virtualenv.location) / "installed"
    if written.exists() and written.read_text("utf-8") == wanted:
        session.log("installed already")
        return
    session.log("installing; the first time this downloads PyTorch")
    written.unlink(missing_ok=True)
    install(session, *what, isolated=True)
    written.write_text(wanted, "utf-8")


def pytest(session: nox.Session, *where: str, options: tuple[str, ...] = ()) -> None:
    """Run what is there; a folder without a test would be an error, so it is named only once it has one."""
    # One thread for each process of several: more threads than cores spend most of their time waiting for one another.
    env = {"OMP_NUM_THREADS": "1"} if SIDE_BY_SIDE[0] in options else {}
    session.run("python", "-m", "pytest", "-q", *TEST_TIMEOUT, *options, *(session.posargs or where), env=env)


def run_apart(name: str, *words: str) -> tuple[int, str]:
    """Run another session in a process of its own; return its exit status and output."""
    command = (sys.executable, "-m", "nox", "--nocolor", "--session", name, *(("--", *words) if words else ()))
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run(command, cwd=ROOT, env=env, text=True, check=False, **pipes)
    return done.returncode, done.stdout


# What each session runs, once its packages are installed. ``tests`` runs nearly all of them in one environment.


def run_lint(session: nox.Session) -> None:
    session.run("ruff", "check", ".")


def run_types(session: nox.Session) -> None:
    session.run("mypy")


def run_imports(session: nox.Session) -> None:
    session.run("lint-imports")


def run_kernels(session: nox.Session) -> None:
    pytest(session, "tests/kernels", options=SIDE_BY_SIDE)


def run_engine(session: nox.Session) -> None:
    pytest(session, "tests/engine", options=SIDE_BY_SIDE)


def run_dist(session: nox.Session) -> None:
    pytest(session, "tests/dist", options=BY_FILE)


def run_models(session: nox.Session) -> None:
    pytest(session, "tests/models", options=SIDE_BY_SIDE)


def run_integrations(session: nox.Session) -> None:
    """With the libraries that are there: where one is missing, its tests are skipped."""
    pytest(session, "tests/integrations", options=SIDE_BY_SIDE)


def run_meta(session: nox.Session) -> None:
    pytest(session, "tests/meta")


def run_docs(session: nox.Session) -> None:
    session.run("mkdocs", "build", "--quiet", "--strict", "--site-dir", str(Path(session.create_tmp()) / "site"))
    pytest(session, "tests/docs", options=SIDE_BY_SIDE)


def run_bench_once(session: nox.Session) -> None:
    """Every benchmark once, untimed, so that none of them rots."""
    pytest(session, "benchmarks", options=(*SIDE_BY_SIDE, "--benchmark-disable"))


def run_gpu(session: nox.Session) -> None:
    found = session.run("python", "-c", "import torch; print(torch.cuda.is_available())", silent=True)
    if str(found).strip() != "True":
        session.warn("NO GPU: torch finds no CUDA device here, so nothing was tested on one.")
        return
    pytest(session, "tests/gpu")


@nox.session
def lint(session: nox.Session) -> None:
    """Style."""
    install(session, "ruff")
    run_lint(session)


@nox.session
def types(session: nox.Session) -> None:
    """Static types, strictly."""
    install(session, *ALL, "mypy")
    run_types(session)


@nox.session
def imports(session: nox.Session) -> None:
    """Who may import whom."""
    install(session, *ALL, "import-linter")
    run_imports(session)


@nox.session
def pure(session: nox.Session) -> None:
    """The pure core, where neither torch nor numpy is installed; every branch of it."""
    install(session, *CORE, *PYTEST, isolated=True)
    unwanted = ("torch", "numpy", "cupy", "ps_kernels")
    absent = f"from importlib.util import find_spec; assert not [n for n in {unwanted} if find_spec(n)]"
    session.run("python", "-c", absent)
    gate = ("--cov", "--cov-report=term-missing", "--cov-fail-under=100")
    if session.posargs:
        pytest(session)
        return
    pytest(session, "tests/pure", options=(*SIDE_BY_SIDE, "-m", "not slow", *gate))
    pytest(session, "tests/pure", options=(*SIDE_BY_SIDE, "-m", "slow"))  # long searches, thrice as long where traced


@nox.session
def kernels(session: nox.Session) -> None:
    """ps-kernels."""
    install(session, *ALL, *PYTEST, *NVRTC)
    run_kernels(session)


@nox.session
def engine(session: nox.Session) -> None:
    """ps-core with torch."""
    install(session, *ALL, *PYTEST)
    run_engine(session)


@nox.session
def dist(session: nox.Session) -> None:
    """ps-dist, with several processes."""
    install(session, *ALL, *PYTEST)
    run_dist(session)


@nox.session
def models(session: nox.Session) -> None:
    """ps-models."""
    install(session, *ALL, *PYTEST)
    run_models(session)


@nox.session
def integrations(session: nox.Session) -> None:
    """ps-core's integrations, with every library that they are for."""
    install(session, *ALL, *INTEGRATIONS, *PYTEST)
    session.install("--quiet", "--no-compile", "--no-deps", "-c", "constraints.txt", *WITHOUT_OTHERS)
    run_integrations(session)
    pytest(session, "tests/docs/test_recipes.py")


@nox.session
def wheels(session: nox.Session) -> None:
    """Build all wheels into ``wheelhouse``, and install extras from there, each in a fresh environment.

    ``REPOSITORY_URL`` is written into their metadata where it is set. ``-- --dry-run`` resolves and installs nothing.
    """
    install(session, *BUILD)
    house, copies = ROOT / "wheelhouse", Path(session.create_tmp()) / "packages"
    for folder in (house, copies):
        shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "packages", copies, ignore=shutil.ignore_patterns("__pycache__"))
    if url := os.environ.get("REPOSITORY_URL"):
        urls = f'\n[project.urls]\nRepository = "{url}"\nChangelog = "{url}/blob/main/CHANGELOG.md"\n'
        for path in copies.glob("*/pyproject.toml"):
            path.write_text(path.read_text("utf-8") + urls, "utf-8")
    sources = [str(path) for path in sorted(copies.iterdir())]
    session.run(
        "python", "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--wheel-dir", str(house), *sources
    )
    for index, (extra, program) in enumerate(WHEELS_TRIED):
        place = Path(session.create_tmp()) / f"fresh-{index}"
        session.run("python", "-m", "venv", "--clear", str(place))
        python = str(place / ("Scripts" if sys.platform == "win32" else "bin") / "python")
        told = ("--quiet", "--find-links", str(house), "-c", "constraints.txt", *session.posargs)
        session.run(python, "-m", "pip", "install", *told, extra, external=True)
        if "--dry-run" not in session.posargs:
            session.run(python, "-W", "error", "-W", NO_NUMPY, "-c", program, external=True)
        shutil.rmtree(place)


@nox.session
def meta(session: nox.Session) -> None:
    """The rules that the repository keeps: sizes, names, versions, wheels."""
    install(session, *ALL, *PYTEST, *TOOLS)
    run_meta(session)


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation and run its examples."""
    install(session, *ALL, *PYTEST, *DOCS)
    run_docs(session)


@nox.session
def demo(session: nox.Session) -> None:
    """What the project does: train a GPT in less than half of its model data, then forecast a large one."""
    install_once(session, *PACKAGES, "torch", "numpy")
    shutil.rmtree(ROOT / "out" / "demo", ignore_errors=True)  # or a second call would find the run finished
    # In fp32: on a processor without instructions for bf16, training in bf16 would hardly end.
    case = ("--model", "gpt-10m", "--precision", "fp32", "--batch", "4", "--accumulate", "2", "--steps", "200")
    told = ("--device-memory", "48MiB", "--sample", "80", "--out", "out/demo")
    session.run("pstar-train", *case, *told, *session.posargs)
    case = ("--gpus", "8", "--device-memory", "32GiB", "--host-memory", "240GiB", "--batch", "8")
    session.run("pstar", "plan", "gpt-18b", *case, "--brief")
    session.run("python", "-m", "ps_core.demo", "--brief")


@nox.session
def bench(session: nox.Session) -> None:
    """Time what is worth timing."""
    install(session, *ALL, *PYTEST, "pytest-benchmark")
    pytest(session, "benchmarks", options=("--benchmark-columns=min,median,rounds", "--benchmark-sort=name"))


@nox.session
def gpu(session: nox.Session) -> None:
    """What needs a CUDA device."""
    install(session, *ALL, *PYTEST)
    run_gpu(session)


@nox.session
def host_side(session: nox.Session) -> None:
    """The engine on PyTorch for CUDA without a card, on libraries that stand in for CUDA's; downloads 0.5 GB.

    ``-- WHEEL`` takes another PyTorch for CUDA: a file, or a name and version.
    """
    session.install("--quiet", *NEEDED_BY_TORCH, "pytest", "hypothesis")
    session.install("--quiet", "--no-compile", "--no-deps", *(session.posargs or [CUDA_TORCH]), *PACKAGES)
    libraries = str(Path(session.create_tmp()).resolve() / "libraries")
    session.run("python", "tests/host_side/stand_in.py", libraries)
    # The least workspace of cuBLAS, and none of the functions that ask it how to compute.
    env = {"LD_LIBRARY_PATH": libraries, "CUBLAS_WORKSPACE_CONFIG": ":16:8", "DISABLE_ADDMM_CUDA_LT": "1"}
    session.run("python", "-m", "pytest", "-q", "tests/host_side", env=env)


@nox.session
def soak(session: nox.Session) -> None:
    """Long forms of the tests: rows marked ``soak``, and ten times as many examples of every property, new ones."""
    install(session, *ALL, *PYTEST, *NVRTC)
    session.env["HYPOTHESIS_PROFILE"] = "explore"
    parts = (f"tests/{name}" for name in ("pure", "kernels", "engine", "dist", "models", "integrations"))
    pytest(session, *parts, options=(*BY_FILE, "--soak", "-o", "faulthandler_timeout=7000"))


@nox.session
def tests(session: nox.Session) -> None:
    """Everything that runs on each change."""
    checks = (
        run_lint,
        run_types,
        run_imports,
        run_meta,
        run_kernels,
        run_engine,
        run_dist,
        run_models,
        run_integrations,
        run_docs,
    )
    failed = []
    # pip and the checks of the source use one core, so sessions with environments of their own run at the same time.
    with ThreadPoolExecutor(1) as pool:
        apart = {name: pool.submit(run_apart, name, *words) for name, words in APART.items()}
        install(session, *ALL, *PYTEST, *TOOLS, *NVRTC)
        for step in (*checks, run_bench_once, run_gpu):
            name = step.__name__.removeprefix("run_")
            session.log(name)
            try:
                step(session)
            except CommandFailed:
                failed.append(name)
    for name, future in apart.items():
        status, output = future.result()
        session.log(f"{name}, which ran at the same time")
        print(output, end="", flush=True)
        failed += [name] if status else []
    if failed:
        session.error(f"failed: {', '.join(failed)}")
