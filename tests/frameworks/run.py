"""Checks exports with the frameworks' own parsers, each in a folder of its own: `make test-frameworks`.

DeepSpeed and Axolotl also train a tiny model as an export says, and must hold the bytes that were promised. A command
that trains with Lightning is tuned. Kernels are compiled by another Triton than a GPU's torch 2.11 has, and run in its
interpreter.

A framework's package is unpacked without its dependencies, and the few that its parser imports are installed beside it.
torch and transformers are those of this project's environment. The exports are written by this process; a check reads
them in a process that sees the framework, and of the project what counts bytes.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tarfile
import zipfile
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from bexp.api.cli.exported_into import exported_into
from bexp.explorer.exports.export import export
from bexp.explorer.formats.request import parse_request
from bexp.explorer.trainers.document import ExportError
from tests.explorer.exports.samples import candidate, exploration
from tests.explorer.formats.trainer_files import FILES, beside_its_model
from tests.frameworks.answers import ANSWERS
from tests.frameworks.promise import TRAINED, write_promise

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


@dataclass(frozen=True)
class Package:
    """What is downloaded for one check; `formats` are the exports that it reads.

    A requirement that is also `beside` is only installed.
    """

    requirement: str
    formats: tuple[str, ...]
    beside: tuple[str, ...] = ()
    is_source: bool = False


DATASETS = ("datasets<4.8", "pyarrow", "dill", "xxhash", "multiprocess", "pandas", "pytz", "python-dateutil", "six")

PACKAGES = {
    "megatron": Package(
        "megatron-core==0.19.0", ("megatron",), ("triton", "omegaconf", "antlr4-python3-runtime==4.9.*", "einops")
    ),
    "deepspeed": Package(
        "deepspeed==0.19.8", ("deepspeed",), ("hjson", "msgpack", "py-cpuinfo", "einops", "ninja"), is_source=True
    ),
    "torchtitan": Package(
        "torchtitan==0.3.0",
        ("torchtitan",),
        (
            *(
                "tyro",
                "typeguard",
                "shtab",
                "docstring_parser",
                "spmd_types==0.2.3",
                "torchdata",
                "torch_checkpointing",
            ),
            *DATASETS,
            *("aiohttp", "wandb", "tensorboard", "protobuf", "absl-py", "pillow", "triton", "einops"),
        ),
    ),
    "axolotl": Package(
        "axolotl==0.21.0",
        ("axolotl",),
        (
            *("axolotl-contribs-lgpl==0.0.7", "axolotl-contribs-mit==0.0.6", "peft==0.21.2", "trl==1.14.1"),
            *("bitsandbytes==0.50.2", "torchao==0.18.0", "posthog==6.7.11", "backoff", "distro"),
            *("datasets==5.0.1", *DATASETS[1:], "aiohttp", "aiohappyeyeballs", "aiosignal", "frozenlist", "multidict"),
            *("yarl", "propcache", "addict", "colorama", "fastcore", "fire", "termcolor", "numba", "llvmlite"),
            *("zstandard", "evaluate", "wandb", "protobuf", "pillow"),
        ),
    ),
    "trl": Package("trl==1.16.0", ("trl",), ("peft==0.21.2", "datasets==5.0.1", *DATASETS[1:])),
    "optimizers": Package("bitsandbytes==0.50.0", (), ("torchao==0.18.0", "peft==0.21.2")),
    "triton": Package("triton==3.7.1", (), ("triton==3.7.1",)),
    "lightning": Package(
        "lightning==2.6.6", ("lightning",), ("pytorch-lightning==2.6.6", "lightning-utilities", "torchmetrics")
    ),
    "llamafactory": Package(
        "llamafactory==0.9.5",
        ("llamafactory",),
        ("omegaconf", "antlr4-python3-runtime==4.9.*", "peft", "psutil", *DATASETS),
    ),
}


def main() -> int:
    """Check the named frameworks, by default all; return the number of those that refuse an export."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(PACKAGES)}")
    parser.add_argument("--folder", type=Path, default=Path(".frameworks"))
    arguments = parser.parse_args()
    failed = 0
    for name in arguments.names or PACKAGES:
        folder = arguments.folder.resolve() / name
        install(PACKAGES[name], folder)
        failed += check(name, PACKAGES[name], folder)
    return failed


def install(package: Package, folder: Path) -> None:
    """Unpack a package and install what its parser imports; nothing is done if that was done before."""
    done = folder / "installed"
    if done.exists() and done.read_text() == repr(package):
        return
    wheels, library = folder / "wheels", folder / "library"
    library.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    kind = ["--no-binary=:all:"] if package.is_source else ["--python-version=3.12", "--only-binary=:all:"]
    download = ["download", "--quiet", "--no-deps", "--no-build-isolation", *kind, "--dest", str(wheels)]
    if package.requirement not in package.beside:
        subprocess.run([*pip, *download, package.requirement], check=True)
    if package.beside:  # first, because pip replaces a folder of theirs that the package shares
        subprocess.run(
            [*pip, "install", "--quiet", "--no-deps", "--upgrade", "--target", str(library), *package.beside],
            check=True,
        )
    for path in wheels.glob("*"):
        if path.suffix == ".whl":
            with zipfile.ZipFile(path) as wheel:
                wheel.extractall(library)
        else:
            with tarfile.open(path) as source:
                source.extractall(folder, filter="data")
    done.write_text(repr(package))


def write_own_files(name: str, folder: Path) -> None:
    """Write the files that people train with, each with the export of an answer in it."""
    folder.mkdir(exist_ok=True)
    for number, (trainer, text) in enumerate(FILES.values()):
        if trainer == name:
            path = folder / f"{number}.yaml"
            path.write_text(text)
            asked = parse_request(beside_its_model(trainer, text))
            answer = replace(exploration(candidate(8, expert_backend=None)), request=asked)
            path.write_text(exported_into(path, name, export(name, answer).text, asked)[0])


def check(name: str, package: Package, folder: Path) -> bool:
    """Write the exports, have the framework read them, and return whether it refused one."""
    written = folder / "exports"
    written.mkdir(exist_ok=True)
    for path in written.iterdir():
        path.unlink()
    for export_format in package.formats:
        for answer, answered in ANSWERS.items():
            with suppress(ExportError):  # a trainer that cannot express an answer gets no file
                (written / f"{export_format}.{answer}").write_text(export(export_format, answered).text)
    write_own_files(name, folder / "own")
    sources = [str(path) for path in folder.glob(f"{name}-*") if path.is_dir()]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*sources, str(folder / "library"), str(ROOT)])}
    scripts = {HERE / f"read_{name}.py": written}
    if name in TRAINED:
        write_promise(name, folder / "trained")
        scripts[HERE / f"train_{name}.py"] = folder / "trained"
    if (HERE / f"tune_{name}.py").exists():
        scripts[HERE / f"tune_{name}.py"] = folder / "tuned"
    failed = False
    for script, given in scripts.items():
        command = [sys.executable, "-W", "ignore", str(script), str(given)]
        refused = subprocess.run(command, cwd=folder, env=environment, check=False).returncode != 0
        sys.stdout.write(f"{package.requirement}, {script.name}: {'refused' if refused else 'accepted'}\n")
        failed |= refused
    return failed


if __name__ == "__main__":
    sys.exit(main())
