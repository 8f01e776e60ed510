"""The commands of the README exist and mean what it says; the long ones run in tests of their own, named here."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from components.config import load_config

ROOT = Path(__file__).parents[1]
BLOCKS = re.findall(r"^```\n(.*?)^```", (ROOT / "README.md").read_text(), flags=re.S | re.M)
COMMANDS = [
    line for block in BLOCKS for line in block.splitlines() if line.startswith((".venv/bin/", "make ", "RAY_", "ray "))
]

RUN_ELSEWHERE = {
    "make demo": "tests/workflows/test_full_pipeline.py (the same script, small)",
    "serve run": "tests/serve/test_serve.py",
    "serve.client": "tests/serve/test_client.py",
    "ray start": "tests/workflows/test_full_pipeline.py::test_ray_job_submit",
    "ray job submit": "tests/workflows/test_full_pipeline.py::test_ray_job_submit",
    "ray stop": "tests/workflows/test_full_pipeline.py::test_ray_job_submit",
    "mlflow ui": "below",
    "workflows/": "tests/workflows/test_full_pipeline.py",
}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_known_and_has_its_test(command: str) -> None:
    homes = [home for part, home in RUN_ELSEWHERE.items() if part in command]
    assert homes, f"{command}: no test runs this command of the README"
    for home in homes:
        path = re.match(r"tests/[\w/]+\.py", home)
        assert path is None or (ROOT / path.group()).exists()


@pytest.mark.parametrize(
    "command", [command for command in COMMANDS if "workflows/" in command and "submit" not in command]
)
def test_workflow_commands_name_scripts_and_settings_that_exist(command: str) -> None:
    words = shlex.split(command)
    assert (ROOT / words[1]).is_file()
    overrides = [word for word in words if "=" in word]
    config = words[words.index("--config") + 1] if "--config" in words else None
    load_config(ROOT / config if config else None, overrides)


@pytest.mark.parametrize("target", ["setup", "demo", "test", "test-all", "bench"])
def test_make_targets(target: str) -> None:
    result = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_mlflow_has_the_command_that_the_readme_names() -> None:
    result = subprocess.run(
        [str(ROOT / ".venv/bin/mlflow"), "ui", "--help"], capture_output=True, text=True, check=False, timeout=120
    )
    assert "--backend-store-uri" in result.stdout
