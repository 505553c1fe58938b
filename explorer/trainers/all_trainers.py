"""The list of trainers: in addition to a trainer's own module, the one place that names it."""

from __future__ import annotations

from bexp.explorer.trainers.accelerate import ACCELERATE
from bexp.explorer.trainers.axolotl import AXOLOTL
from bexp.explorer.trainers.bexp import BEXP_APPLY
from bexp.explorer.trainers.cerebras import CEREBRAS
from bexp.explorer.trainers.deepspeed import DEEPSPEED
from bexp.explorer.trainers.lightning import LIGHTNING
from bexp.explorer.trainers.llamafactory import LLAMAFACTORY
from bexp.explorer.trainers.megatron import MEGATRON
from bexp.explorer.trainers.torchtitan import TORCHTITAN
from bexp.explorer.trainers.torchtune import TORCHTUNE
from bexp.explorer.trainers.trainer import Trainer
from bexp.explorer.trainers.transformers import TRANSFORMERS_TRAINER
from bexp.explorer.trainers.trl import TRL

ALL_TRAINERS: tuple[Trainer, ...] = (
    *(BEXP_APPLY, TRANSFORMERS_TRAINER, TRL, ACCELERATE, DEEPSPEED, TORCHTITAN, MEGATRON, LIGHTNING, AXOLOTL),
    *(LLAMAFACTORY, TORCHTUNE, CEREBRAS),
)
"""In the order of lists for people. An answer is for the first where a request names none."""
