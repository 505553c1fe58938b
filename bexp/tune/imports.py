"""Changes a library as soon as the training command has imported it, and never imports one by itself."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

Patch = Callable[[ModuleType], None]


def arm() -> None:
    """Have each library patched that a loop of training may be in."""
    if not any(isinstance(finder, _Watcher) for finder in sys.meta_path):
        patches: dict[str, Patch] = {
            "transformers.trainer": _patch_trainer,
            "accelerate.accelerator": _patch_accelerate,
            "torch.optim.optimizer": _patch_torch,
            "torch.utils.data.dataloader": _patch_loaders,
        }
        sys.meta_path.insert(0, _Watcher(patches))


def _patch_trainer(module: ModuleType) -> None:
    from bexp.tune.hf_trainer import patch  # noqa: PLC0415 - it needs what the command has just imported

    patch(module)


def _patch_accelerate(module: ModuleType) -> None:
    from bexp.tune.accelerate_loop import patch  # noqa: PLC0415 - it needs what the command has just imported

    patch(module)


def _patch_torch(module: ModuleType) -> None:
    from bexp.tune.own_loop import patch  # noqa: PLC0415 - it needs what the command has just imported

    patch(module)


def _patch_loaders(module: ModuleType) -> None:
    from bexp.tune.data_loader import patch  # noqa: PLC0415 - it needs what the command has just imported

    patch(module)


class _Watcher(MetaPathFinder):
    """Finds modules as the other finders do, and patches some of them after they have run."""

    def __init__(self, patches: dict[str, Patch]) -> None:
        self._patches = patches

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of a watched module, whose loader patches it; None for any other."""
        patch = self._patches.get(fullname)
        if patch is None:
            return None
        del self._patches[fullname]  # once is enough, and the other finders are asked below
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _Patching(spec.loader, patch)
                return spec
        return None


class _Patching(Loader):
    """The loader of a module, and a patch that follows."""

    def __init__(self, loader: Loader, patch: Patch) -> None:
        self._loader = loader
        self._patch = patch

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """As the loader does."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """As the loader does, and the patch."""
        self._loader.exec_module(module)
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._patch(module)

    def __getattr__(self, name: str) -> object:
        return getattr(self._loader, name)
