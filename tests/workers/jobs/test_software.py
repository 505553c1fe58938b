from __future__ import annotations

from importlib.metadata import version

from bexp.workers.jobs.worker import PACKAGES, installed_software


def test_the_versions_of_installed_packages_are_named_and_no_others() -> None:
    found = installed_software()
    assert found["bexp"] == version("bexp")
    assert found["transformers"] == version("transformers")
    assert set(found) <= set(PACKAGES)
