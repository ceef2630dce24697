"""The tutorial about many nodes: its commands run one after the other, on two processes, one of which is killed."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from ps_models.train._option_files import from_text, merged
from ps_models.train._setup import shape_of

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "tutorials" / "from-one-gpu-to-many-nodes.md").read_text("utf-8")
CONSOLE = re.compile(r"^```console\n(.*?)^```\n\n```text\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
PROGRAMS = {
    "python": (),
    "pstar": ("-m", "ps_core.cli"),
    "pstar-train": ("-m", "ps_models.train"),
    "torchrun": ("-m", "torch.distributed.run"),
}
LAST, EVERY = 40, 5


def commands(block: str) -> Iterator[tuple[list[str], str | None]]:
    """The words of each command of a block, and the file that its output goes to."""
    for line in block.splitlines():
        words, _, target = line.removeprefix("$ ").partition(" > ")
        program, *rest = shlex.split(words)
        yield [sys.executable, *PROGRAMS[program], *rest], target or None


def killable(words: Sequence[str]) -> list[str]:
    """A command of torchrun that starts the processes again, and a training that saves often."""
    at = words.index("--nproc-per-node=2")
    return [*words[:at], "--max-restarts=1", *words[at:], "--checkpoint-every", str(EVERY)]


def start(words: Sequence[str], folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        words,
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def rows(folder: Path) -> list[dict[str, Any]]:
    try:
        lines = (folder / "metrics.jsonl").read_text("utf-8").splitlines(keepends=True)
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def rank_one(parent: int) -> int | None:
    """The process that torchrun calls rank 1."""
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(status.read_text("utf-8").rpartition(")")[2].split()[1]) != parent:
                continue
            if b"\0RANK=1\0" in b"\0" + status.with_name("environ").read_bytes():
                return int(status.parent.name)
        except OSError:
            continue  # it has ended meanwhile
    return None


def kill_one(torchrun: subprocess.Popen[str], run: Path) -> int:
    """Once there is a checkpoint; how many steps were done then."""
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline and torchrun.poll() is None:
        done, process = len(rows(run)), rank_one(torchrun.pid)
        if done > EVERY and process is not None:
            os.kill(process, signal.SIGKILL)
            return done
        time.sleep(0.02)
    raise AssertionError("it ended before it could be disturbed")


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds the process to kill in /proc")
def test_the_page(tutorials: Any, tmp_path: Path) -> None:
    blocks = CONSOLE.findall(PAGE)
    assert len(blocks) == 3
    killed = 0
    for block, shown in blocks:
        said = ""
        for words, target in commands(block):
            shared = "--nproc-per-node=2" in words
            process = start(killable(words) if shared else words, tmp_path)
            try:
                if shared:
                    killed += 1
                    assert kill_one(process, tmp_path / "two") < LAST
                output = process.communicate(timeout=600)[0]
            finally:
                process.kill()
            assert process.returncode == 0, output
            if target is None:
                said += output
            else:
                (tmp_path / target).write_text(output, "utf-8")
        for part in shown.split("...\n"):
            assert not part or any(
                tutorials.alike(part, "".join(said.splitlines(keepends=True)[at : at + part.count("\n")]))
                for at in range(said.count("\n"))
            ), said
    assert killed == 1
    one, two = rows(tmp_path / "one"), rows(tmp_path / "two")
    assert [row["step"] for row in two] == list(range(1, LAST + 1))
    assert [row["loss"] for row in two] == pytest.approx([row["loss"] for row in one], rel=0.02)


def test_the_scripts() -> None:
    """As far as they can be looked at without a cluster."""
    (script,) = re.findall(r"^```bash\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("bash is not installed")
    assert subprocess.run([bash, "-n"], input=script, text=True, check=False).returncode == 0
    (options,) = re.findall(r"^```toml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    shape_of(merged(from_text(options, "run.toml"), {}))
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    (manifest,) = re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    service, job = yaml.safe_load_all(manifest)
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    nodes = job["spec"]["completions"]
    assert (service["kind"], job["kind"]) == ("Service", "Job")
    assert f"--nnodes={nodes}" in container["command"]
    first = f"{job['metadata']['name']}-0.{pod['subdomain']}:29500"
    assert f"--rdzv-endpoint={first}" in container["command"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
