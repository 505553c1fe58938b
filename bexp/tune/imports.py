"""Patches of a library, made as soon as the training command has imported it. No library is imported for them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from bexp.tune.link import PROMISE, note_failure

Patch = Callable[[ModuleType], None]


def arm() -> None:
    """Watch for each library that may hold a training loop, to patch it for a trial or for a run with an answer."""
    if any(isinstance(finder, _Watcher) for finder in sys.meta_path):
        return
    patches: dict[str, Patch] = {
        "transformers.trainer": partial(_patch, "hf_trainer"),
        "accelerate.accelerator": partial(_patch, "accelerate_loop"),
        "accelerate.utils.memory": partial(_patch, "finders"),
        "lightning.pytorch.trainer.trainer": partial(_patch, "lightning_loop"),
        "pytorch_lightning.trainer.trainer": partial(_patch, "lightning_loop"),
        "torch.optim.optimizer": partial(_patch, "own_loop"),
        "torch._dynamo.callback": partial(_patch, "compilation"),
        "torch.utils.data.dataloader": partial(_patch, "data_loader"),
    }
    if PROMISE in os.environ:
        patches = {
            "transformers.trainer": partial(_patch, "applied_trainer"),
            "accelerate.accelerator": partial(_patch, "applied_loop"),
            "accelerate.utils.memory": partial(_patch, "finders"),
            "lightning.pytorch.trainer.trainer": partial(_patch, "applied_lightning"),
            "pytorch_lightning.trainer.trainer": partial(_patch, "applied_lightning"),
            "torch.optim.optimizer": partial(_patch, "promise"),
        }
    else:
        sys.excepthook = partial(_note_and_print, sys.excepthook)
    sys.meta_path.insert(0, _Watcher(patches))


def _patch(name: str, module: ModuleType) -> None:
    """Patch a module with one of ours, which needs what the command has just imported."""
    import_module(f"bexp.tune.{name}").patch(module)


def _note_and_print(print_traceback: Callable[..., object], kind: Any, error: BaseException, trace: Any) -> None:
    """Note the error that ends this process, if it belongs to a group that trains, and let Python print it."""
    if "torch" in sys.modules:
        from bexp.tune.reply import failed  # noqa: PLC0415 - needs torch

        note_failure(failed(error))
    print_traceback(kind, error, trace)


class _Watcher(MetaPathFinder):
    """A finder that asks the other finders, and patches some modules after they have run."""

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
        """Create the module as the loader does."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Run the module as the loader does, then the patch."""
        self._loader.exec_module(module)
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._patch(module)

    def __getattr__(self, name: str) -> object:
        return getattr(self._loader, name)
