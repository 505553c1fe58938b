"""Which folder each package comes from.

The four folders of the service lie at the top of a checkout and are installed below `bexp`, so that nothing called
`api` or `workers` lands in site-packages. pyproject.toml has the rest: it can map a folder to a name, but cannot find
the packages in it.
"""

from setuptools import find_packages, setup

SERVICE = ("api", "explorer", "storage", "workers")


def _packages() -> list[str]:
    ours = find_packages(include=["bexp", "bexp.*"])
    return ours + [f"bexp.{name}" for room in SERVICE for name in find_packages(include=[room, f"{room}.*"])]


setup(packages=_packages(), package_dir={f"bexp.{room}": room for room in SERVICE})
