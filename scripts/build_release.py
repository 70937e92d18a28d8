"""Builds what is uploaded, and tries it as its users get it.

    python scripts/build_release.py dist

The sdist and the wheel are built from the files that git tracks, with the README's links made
absolute. `twine check` reads them. Each is installed into an empty environment, where the README's
five minutes run. It uploads nothing.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RELATIVE_IMAGE = re.compile(r"(!\[[^\]]*\]\()(?!https?://)")
RELATIVE_LINK = re.compile(r"\]\((?!https?://|#|mailto:)([^)\s]+)\)")
PYTHON_BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
WORKER = "import os; print('process', os.environ['HOLDFAST_PROCESS_ID'])"


def absolute_links(text: str, repository: str, revision: str) -> str:
    """Returns Markdown whose relative links lead to files of the repository at a revision."""
    text = RELATIVE_IMAGE.sub(rf"\1{repository}/raw/{revision}/", text)
    return RELATIVE_LINK.sub(rf"]({repository}/blob/{revision}/\1)", text)


def copy_sources(target: Path) -> None:
    """Copies what git tracks, links as links, with the README as it is uploaded."""
    listed = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True)
    for name in filter(None, listed.split("\0")):
        copied = target / name
        copied.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, copied, follow_symlinks=False)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    readme = target / "README.md"
    revision = f"v{project['version']}"
    links = absolute_links(readme.read_text(), project["urls"]["Repository"], revision)
    readme.write_text(links)


def build(target: Path) -> list[Path]:
    """Builds the sdist, and the wheel from it, into an empty folder; returns both."""
    shutil.rmtree(target, ignore_errors=True)
    with tempfile.TemporaryDirectory() as scratch:
        copy_sources(Path(scratch))
        command = [sys.executable, "-m", "build", "--outdir", str(target.resolve()), scratch]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    built = sorted(target.iterdir())
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *built], check=True)
    return built


def try_out(package: Path) -> None:
    """Installs a package into an empty environment, and runs the README's five minutes there."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        venv.create(folder / "venv", with_pip=True)
        commands = folder / "venv" / "bin"
        pip = [
            commands / "python",
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
        ]
        subprocess.run([*pip, package.resolve()], check=True)
        # Nothing of this checkout may be found: neither by the folder nor by the environment.
        environment = {"PATH": f"{commands}:{os.environ['PATH']}", "HOME": scratch}
        environment["JAX_PLATFORMS"] = "cpu"
        (folder / "first.py").write_text("\n".join(PYTHON_BLOCK.findall(readme())))
        (folder / "worker.py").write_text(WORKER)
        for command in (
            ["python", "first.py"],
            ["holdfast", "--version"],
            ["holdfast", "run", "-n", "4", "--", "python", "worker.py"],
            ["holdfast", "ls", "runs/first"],
            ["holdfast", "show", "runs/first"],
            ["holdfast", "verify", "runs/first"],
        ):
            print("$", *command, flush=True)
            found = shutil.which(command[0], path=environment["PATH"])
            assert found is not None, f"{package.name} installed no {command[0]}"
            subprocess.run([found, *command[1:]], cwd=folder, env=environment, check=True)


def readme() -> str:
    """Returns the README as it is in the tree."""
    return (ROOT / "README.md").read_text()


def main() -> None:
    """Builds, checks and tries both packages; leaves them in the folder that is named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", type=Path, help="where the packages go; emptied first")
    target = parser.parse_args().target
    for package in build(target):
        print(f"\n{package.name} in an empty environment:", flush=True)
        try_out(package)
    print(f"\nReady to upload: twine upload {target}/*")


if __name__ == "__main__":
    main()
