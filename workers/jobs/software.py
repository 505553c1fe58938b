"""The packages whose versions the speed of a component depends on, beyond those that the hardware's description has."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

PACKAGES = ("bexp", "transformers", "liger-kernel", "peft", "flash-attn")


def installed_software() -> dict[str, str]:
    """Return the version of each of them that is installed, by name."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
