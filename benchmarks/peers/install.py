"""Makes a venv for each framework under .peers/ and writes down what it cost: `make peers`.

    python benchmarks/peers/install.py [tunix trl ours]

pip downloads afresh (--no-cache-dir), from wherever it is set up to. TRL gets a CPU build of torch if pip finds
one of this version first; set PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS where that is not so.
"""

import argparse
import datetime
import json
import os
import shutil
import subprocess
import sys
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VENVS = ROOT / ".peers"
RESULTS = ROOT / "benchmarks" / "results" / "peers_install.json"
TORCH = "torch==2.13.0"
# One pip call a list, in this order. ours is installed only to be measured: races run it from .venv.
PACKAGES = {
    "tunix": [["google-tunix==0.1.7", "jax"]],
    "trl": [[TORCH], ["trl[peft]"]],
    "ours": [[str(ROOT)]],
}
OWN = {"tunix": "google-tunix", "trl": "trl", "ours": "tunix_lite"}


def install(framework: str) -> dict:
    """Makes the venv anew. Seconds, bytes on the disk without pip's own, distributions, the version."""
    folder = VENVS / framework
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True)
    empty = size_of(folder)
    python = str(folder / "bin" / "python")
    began = time.perf_counter()
    for packages in PACKAGES[framework]:
        command = [python, "-m", "pip", "install", "--quiet", "--no-cache-dir", *packages]
        if subprocess.run(command).returncode:
            # A half-made venv would pass for an installed framework.
            shutil.rmtree(folder)
            sys.exit(f"{framework}: pip could not install {' '.join(packages)}")
    seconds = time.perf_counter() - began
    listed = subprocess.run([python, "-m", "pip", "list", "--format=json"], capture_output=True, text=True, check=True)
    versions = {each["name"].replace("-", "_"): each["version"] for each in json.loads(listed.stdout)}
    return {
        "seconds": round(seconds, 1),
        "megabytes": round((size_of(folder) - empty) / 1e6),
        "distributions": len(versions) - sum(name in versions for name in ("pip", "setuptools")),
        "version": versions[OWN[framework].replace("-", "_")],
        "load_after": round(os.getloadavg()[0], 2),
        "date": datetime.date.today().isoformat(),
    }


def size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file() and not file.is_symlink())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("frameworks", nargs="*", metavar="FRAMEWORK", help=f"{', '.join(PACKAGES)}; without it all")
    args = parser.parse_args()
    for framework in args.frameworks:
        if framework not in PACKAGES:
            parser.error(f"there is no {framework!r}; there are {', '.join(PACKAGES)}")
    for framework in args.frameworks or PACKAGES:
        found = install(framework)
        print(f"{framework}: {found}", flush=True)
        known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(known | {framework: found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
