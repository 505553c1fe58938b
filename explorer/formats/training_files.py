"""Reads the files of trainers that are given with a model.

One is a trainer's own file with the config.json of its base model: `{"axolotl": FILE, "model": CONFIG}`. Keys in the
table of the trainer are kept. A key that changes speed or memory and is not measured is refused, and an unknown key is
noted.

The others are files of the training side with any model, such as DeepSpeed's JSON under `deepspeed`. The batch, the
number formats, the optimizer and the sharding are kept. The micro-batch of a file is the base to compare with, because
an exploration chooses it. A field that is neither read nor known to change nothing is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from bexp.explorer.dimensions.recompute import Recompute
from bexp.explorer.formats.document import FormatError
from bexp.explorer.model.lengths import EPOCH_TEXTS
from bexp.explorer.model.spelling import shortened
from bexp.explorer.model.target import TRANSFORMERS
from bexp.explorer.model.training import Sharding
from bexp.explorer.model.translation import Location, Translation, is_unset, put_dtype
from bexp.explorer.trainers.accelerate import Launch, read_launch
from bexp.explorer.trainers.deepspeed import read_config
from bexp.explorer.trainers.fsdp import Fsdp, keep_recomputation, read_fsdp, refuse_second_sharding
from bexp.explorer.trainers.keys import (
    EXPLORED,
    LORA_FIELDS,
    QLORA,
    Batch,
    Formats,
    Key,
    Setting,
    TrainerFile,
    is_among,
)
from bexp.explorer.trainers.registry import FILES, SIDE_FILES, TRAINERS

UNREAD = "is the path of a file that was not found: put its content here"


def find_trainer(document: Mapping[str, Any], named: str | None) -> str | None:
    """Return the trainer whose own file a document is, by the key of its base model; None without one.

    Raises FormatError if the file may be that of several trainers, and `named` is none of them.
    """
    if "hf_config" in document:
        return None
    names = [name for name, file in FILES.items() if isinstance(dict(_values(file, document)).get(file.model), str)]
    if named in names or len(names) < 2:
        return named if named in names else next(iter(names), None)
    raise FormatError([((FILES[names[0]].model,), f"say whose file this is: --trainer {' or '.join(names)}")])


def base_model(name: str, document: Mapping[str, Any]) -> str:
    """Return the base model that a trainer's own file names: a folder, or a name on the Hugging Face hub."""
    return str(dict(_values(FILES[name], document))[FILES[name].model])


def setting_of(name: str, key: str) -> Setting | None:
    """Return the setting of a key of a trainer's own file; None for keys that are not read."""
    known = FILES[name].keys.get(key)
    return None if known is None else known.setting


def is_said(name: str, key: str, value: Any, file: Mapping[str, Any]) -> bool:
    """Return whether a trainer does with a `file` what a value of a key says, so that no line needs to change.

    A key that the file leaves out is said only if the trainer's default is known: Axolotl turns some kernels on itself.
    """
    known, defaults = FILES[name].keys.get(key), FILES[name].defaults
    if key in file and file[key] == value:
        return True
    if known is None or known.setting is None or (key not in file and known.setting not in defaults):
        return False
    read = known.read or (lambda meaning: meaning)
    try:
        said = read(file[key]) if key in file else defaults[known.setting]
    except ValueError:
        return False
    return bool(read(value) == said)


def why_refused(name: str, key: str) -> str | None:
    """Return why a key of a trainer's own file is refused where it is set; None for other keys."""
    return next((why for pattern, why in FILES[name].refused.items() if is_among(key, (pattern,))), None)


def _listed(value: Any) -> list[Any]:
    """Return a list of one item for a value that may stand without a list."""
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _values(file: TrainerFile, values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the keys, dotted where a trainer nests them, with their values, which may be None."""
    for key, value in values.items():
        if file.is_nested and isinstance(value, Mapping):
            yield from _values(file, value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value


@dataclass
class StatedTraining:
    """The settings of a trainer's own file, and their keys."""

    name: str
    said: dict[Setting, Any] = field(default_factory=dict)
    keys: dict[Setting, str] = field(default_factory=dict)

    @classmethod
    def read(cls, name: str, document: Any, translation: Translation, *, has_length: bool) -> StatedTraining:
        """Read a file, refuse what is not measured, and set the length of a sequence, with which the model is read.

        With `has_length`, the length is given outside the file.
        """
        stated, file, unknown, uncut = cls(name), FILES[name], [], False
        for key, value in _values(file, translation.section(document, (name,)).values):
            reason = why_refused(name, key)
            if value is None:
                uncut |= setting_of(name, key) is Setting.SEQ_LENGTH
            elif (known := file.keys.get(key)) is not None and known.is_read:
                stated._take(key, value, known, translation)
            elif reason is not None:
                if not is_unset(value) and not (key.endswith(("_size", "_degree", "_dim")) and value == 1):
                    translation.refuse(stated.at(key), reason)
            elif not is_among(key, file.harmless):
                unknown.append(key)
        translation.note_unknown(unknown)
        stated.said = {**file.defaults, **stated.said}
        length = stated.said.get(Setting.SEQ_LENGTH)
        if (uncut or length is None) and not has_length:
            translation.refuse(
                stated.source(Setting.SEQ_LENGTH), "cuts no text, so that no length is known: say --seq-length"
            )
        elif length is not None:
            translation.put(("model", "seq_length"), length, stated.source(Setting.SEQ_LENGTH))
        return stated

    def at(self, key: str) -> Location:
        """Return the location of a key in the document."""
        return (self.name, *(key.split(".") if FILES[self.name].is_nested else (key,)))

    def source(self, setting: Setting) -> Location:
        """Return the location of a setting, or of the key that could set it."""
        keys = [key for key in FILES[self.name].keys if setting_of(self.name, key) is setting]
        return self.at(self.keys.get(setting) or keys[0]) if keys else (self.name,)

    def _take(self, key: str, value: Any, known: Key, translation: Translation) -> None:
        try:
            result, setting = value if known.read is None else known.read(value), known.setting
        except ValueError as error:
            translation.refuse(self.at(key), str(error))
            return
        if setting is None or result is None:
            return
        before = self.said.get(setting)
        if setting is Setting.MODULES and before is not None:
            whole = [one for one in (before, result) if isinstance(one, str)]
            result = whole[0] if whole else [*before, *result]
        elif before not in (None, result):
            translation.refuse(self.at(key), f"contradicts {self.keys[setting]}")
        self.said[setting], self.keys[setting] = result, key

    def translate(
        self,
        translation: Translation,
        num_devices: Any,
        *,
        launch: Launch | None,
        has_lengths: bool,
        has_batching: bool,
    ) -> None:
        """Set everything but the model. `num_devices` multiplies the batch of a device; None is the file's own.

        `launch` starts the processes of the trainer. With `has_lengths` and `has_batching`, the lengths of texts and
        their batching are given outside the file.
        """
        said, file = self.said, FILES[self.name]
        translation.put(("trainer",), self.name)
        if (named := said.get(Setting.LAUNCH)) is not None:
            if launch is not None:
                translation.refuse(self.source(Setting.LAUNCH), "is given a second time: keep one")
            launch = read_launch(translation.section(named, self.source(Setting.LAUNCH)))
        devices, where = said.get(Setting.DEVICES, 1), self.source(Setting.DEVICES)
        if launch is not None and launch.num_processes and Setting.DEVICES not in said:
            devices, where = launch.num_processes, (*launch.location, "num_processes")
        devices = num_devices if isinstance(num_devices, int) and num_devices >= 1 else devices
        translation.put(("num_devices",), devices, where)
        if devices > 1 and file.shards and translation.get("training", "sharding") is None:
            translation.put(("training", "sharding"), "zero3")
        micro = said.get(Setting.MICRO_BATCH_SIZE, 1)
        steps = said.get(Setting.STEPS) or 1
        if Setting.DEVICE_BATCH in said and Setting.STEPS not in said:
            translation.notes.append(
                f"{self.keys[Setting.DEVICE_BATCH]}: accumulates nothing, so that a step of a device has {micro} "
                "sequences: say gradient_accumulation_steps"
            )
        size = self.source(Setting.MICRO_BATCH_SIZE)
        translation.put(("batch_size",), micro * steps * devices, size)
        translation.put(("base_micro_batch_size",), micro, size)
        if not isinstance(said.get(Setting.OPTIMIZER), str):
            translation.refuse(self.source(Setting.OPTIMIZER), "must be the name of an optimizer")
        optimizer = ("training", "optimizer", "name")
        translation.put(optimizer, said.get(Setting.OPTIMIZER), self.source(Setting.OPTIMIZER))
        if said.get(Setting.RECOMPUTATION):
            translation.put(("base_recompute",), Recompute.FULL.value, self.source(Setting.RECOMPUTATION))
        if said.get(Setting.COMPILE):
            self._put_once(translation, "execution", "compile", Setting.COMPILE)
        if (loss := said.get(Setting.LOSS)) is not None:
            translation.notes += [file.other_losses[loss]] if loss in file.other_losses else []
            known = "library" if loss in file.other_losses else loss
            self._put_once(translation, "losses", [known], Setting.LOSS)
        self._put_adapters(translation)
        sharded = self._put_sharding(translation, devices, (micro, steps), launch)
        self._put_formats(translation, sharded, launch)
        self._put_texts(translation, devices, has_lengths=has_lengths, has_batching=has_batching)
        self._note_explored(translation, micro)
        translation.notes += [file.note] if file.note else []

    def _put_once(self, translation: Translation, name: str, value: Any, setting: Setting) -> None:
        """Set a field of a request; refuse another value of it that is given outside the file."""
        given = translation.get(name)
        if given is not None and _listed(given) != _listed(value):
            reason = f"contradicts {name} outside the file, which is {shortened(given)}: keep one"
            translation.refuse(self.source(setting), reason)
        translation.put((name,), value, self.source(setting))

    def _put_adapters(self, translation: Translation) -> None:
        bits = self.said.get(Setting.BITS)
        if bits is not None:
            self._put_once(translation, "quantization", f"bnb_{bits}bit", Setting.BITS)
        if bits == 4 and not self.said.get(Setting.NESTED, True):
            reason = "weights in 4 bits are measured with quantised scales: say true"
            translation.refuse(self.source(Setting.NESTED), reason)
        if self.said.get(Setting.ADAPTERS) == QLORA and bits != 4:
            translation.refuse(self.source(Setting.ADAPTERS), "qlora needs load_in_4bit: true; without it say lora")
        if not self.said.get(Setting.ADAPTERS):
            return
        lora = {setting.value: self.said[setting] for setting in LORA_FIELDS if setting in self.said}
        if self.said.get(Setting.RESIZED):  # then they are trained whole, unless other modules are named
            lora.setdefault(Setting.SAVED.value, ["embed_tokens", "lm_head"])
        if isinstance(rank := lora.get("r"), int):
            lora.setdefault("alpha", rank * FILES[self.name].alpha_by_rank)
        translation.put(("training", "lora"), lora, self.source(Setting.ADAPTERS))
        for setting in LORA_FIELDS:
            translation.sources["training", "lora", setting.value] = self.source(setting)

    def _put_sharding(self, translation: Translation, devices: int, batch: Batch, launch: Launch | None) -> str | None:
        """Set the sharding that DeepSpeed, FSDP or `accelerate launch` asks for.

        Return the precision of weights in bfloat16 that are trained whole and sharded; None where it is the file's.
        """
        config = self.said.get(Setting.DEEPSPEED)
        at = self.source(Setting.DEEPSPEED)
        fsdp, where = self._fsdp(translation, launch)
        if launch is not None and launch.deepspeed is not None:
            if config is not None:
                refuse_second_sharding(translation, launch.deepspeed.location, at)
            config, at = dict(launch.deepspeed.values), launch.deepspeed.location
        if config is not None and (self.said.get(Setting.PURE) or not self._half(launch)):
            way = f"say {self.source(Setting.HALF)[-1]}: true"
            translation.refuse(at, f"DeepSpeed is measured with weights in bfloat16 and their copies in float32: {way}")
        if config is not None and fsdp is not None:
            refuse_second_sharding(translation, where, at)
        if isinstance(config, str):
            self._put_unread(translation, config, devices)
        elif config is not None:
            section = translation.section(config, at)
            read_config(section, devices, batch)
            for name, stated in (("bf16", self._half(launch)), ("fp16", False)):
                if (half := section.section(name).get("enabled")) is not stated and isinstance(half, bool):
                    section.section(name).refuse("enabled", "contradicts the number formats of the file around it")
            return "master"
        if fsdp is None:
            return None
        translation.put(("training", "sharding"), fsdp.level.value, where)
        keep_recomputation(translation, fsdp)
        if fsdp.recomputes:
            translation.put(("base_recompute",), Recompute.FULL.value, where)
        if devices == 1 or fsdp.level is Sharding.NONE:
            return None
        if fsdp.version == 1:
            translation.notes.append(
                f"{'.'.join(map(str, where))}: FSDP1 is measured as FSDP2, which takes less memory: say version 2"
            )
        return "master" if FILES[self.name].widens_fsdp else "pure"

    def _fsdp(self, translation: Translation, launch: Launch | None) -> tuple[Fsdp | None, Location]:
        """Return what FSDP is asked to shard, and where; None where nothing turns it on."""
        file, switch, config = FILES[self.name], self.said.get(Setting.FSDP), self.said.get(Setting.FSDP_CONFIG)
        setting = Setting.FSDP_CONFIG if switch is None else Setting.FSDP
        where = self.source(setting)
        if isinstance(config, str):
            translation.refuse(self.source(Setting.FSDP_CONFIG), UNREAD)
            config = None
        if switch is None and (config is None or file.fsdp_needs_switch):
            if config is not None:
                translation.notes.append(f"{self.keys[Setting.FSDP_CONFIG]} does nothing without fsdp: true")
            if launch is not None and launch.fsdp is not None and launch.fsdp.version not in file.fsdp_versions:
                translation.refuse(
                    (*launch.location, "fsdp_config"), f"must have fsdp_version: {file.fsdp_versions[0]}"
                )
            return (None, where) if launch is None else (launch.fsdp, (*launch.location, "distributed_type"))
        if launch is not None and launch.fsdp is not None:
            refuse_second_sharding(translation, (*launch.location, "distributed_type"), where)
        section = translation.section(config, self.source(Setting.FSDP_CONFIG))
        outer = self.said.get(Setting.FSDP_VERSION)
        return read_fsdp(switch, section, where, file.fsdp_versions, outer=outer), where

    def _put_unread(self, translation: Translation, path: str, devices: int) -> None:
        """Note or refuse the path of a JSON that no command has put into its place."""
        source = self.source(Setting.DEEPSPEED)
        if devices > 1 or not self.said.get(Setting.ADAPTERS):
            translation.refuse(source, UNREAD)
            return
        translation.notes.append(
            f"{self.keys[Setting.DEEPSPEED]}: {shortened(path)} is not read, because ZeRO shards nothing on one "
            "device; where it offloads, put its content here"
        )

    def _half(self, launch: Launch | None) -> bool:
        """Return whether products are in bfloat16; the launcher says so where the file does not."""
        return bool(self.said.get(Setting.HALF, launch is not None and launch.half))

    def _put_formats(self, translation: Translation, sharded: str | None, launch: Launch | None) -> None:
        """Set the number formats; `sharded` is the precision of weights that are sharded in bfloat16."""
        config = translation.get("hf_config") or {}
        checkpoint = str(config.get("dtype") or config.get("torch_dtype") or "float32")
        said = Formats(
            half=self._half(launch),
            pure=bool(self.said.get(Setting.PURE)),
            weights=self.said.get(Setting.WEIGHTS),
            checkpoint=checkpoint,
            has_adapters=bool(self.said.get(Setting.ADAPTERS)),
            is_quantized=Setting.BITS in self.said,
        )
        source = self.source(Setting.PURE if said.pure else Setting.HALF)
        try:
            dtype, precision = FILES[self.name].formats(said)
        except ValueError as error:
            translation.refuse(source, str(error))
            return
        if sharded is not None and said.half and not said.has_adapters:
            precision = sharded
        if dtype == "float32" and precision == "pure" and translation.get("target") == TRANSFORMERS:
            dtype = self._measured_format(translation, has_adapters=said.has_adapters)
        put_dtype(translation, dtype, source)
        if precision is not None:
            translation.put(("training", "precision"), "pure" if said.is_quantized else precision, source)
        if said.half and dtype == said.weights == "bfloat16" and not said.has_adapters and sharded is None:
            translation.notes.append("weights in bfloat16 are measured without autocast: the export says bf16: false")

    def _measured_format(self, translation: Translation, *, has_adapters: bool) -> str:
        """Return the format that is measured in place of float32, and note it; refuse training of all weights."""
        file = FILES[self.name]
        setting = Setting.HALF if any(key.setting is Setting.HALF for key in file.keys.values()) else Setting.WEIGHTS
        key = self.source(setting)
        way = f"say {key[-1]}: {'true' if setting is Setting.HALF else 'bf16'}"
        if has_adapters:
            translation.notes.append(
                f"{key[-1]}: the file computes in float32; frozen weights are measured in bfloat16, with adapters in "
                f"float32 under autocast: {way}, so that both are the same"
            )
        else:
            translation.refuse(key, f"without it the file trains in float32 alone, which is not measured: {way}")
        return "bfloat16"

    def _put_texts(self, translation: Translation, devices: int, *, has_lengths: bool, has_batching: bool) -> None:
        packs, length = self.said.get(Setting.PACKING), translation.get("hf_seq_length")
        fills = Setting.FULL_ROWS if Setting.FULL_ROWS in self.said else Setting.PRETRAINING
        if self.said.get(fills) and has_lengths and not (packs or has_batching):
            reason = "fills every row, however long texts are: leave lengths out, or say batching as well"
            translation.refuse(self.source(fills), reason)
        if self.said.get(Setting.PADDING_FREE) and not packs:
            reason = "rows without padding are measured for packing alone"
            translation.refuse(self.source(Setting.PADDING_FREE), reason)
        if has_lengths:
            batching = "packed" if packs else "grouped" if self.said.get(Setting.ORDER) else "padded"
            source = self.source(Setting.PACKING if packs else Setting.ORDER)
            translation.put(("batching",), batching, source)
        elif packs and devices > 1:
            translation.notes.append("packed rows are measured full, with one text each")
        elif packs and isinstance(length, int):
            translation.put(("lengths",), [[length, EPOCH_TEXTS]], self.source(Setting.PACKING))
            translation.put(("batching",), "packed", self.source(Setting.PACKING))
            translation.notes.append(
                f"packed rows are measured with one text of {length} tokens each; --lengths FILE has the real ones"
            )

    def _note_explored(self, translation: Translation, micro_batch_size: int) -> None:
        names = [self.keys[setting] for setting in EXPLORED if setting in self.keys]
        others = "".join(f", {name}" for name in names)
        recomputed = ", with every layer recomputed" if self.said.get(Setting.RECOMPUTATION) else ""
        base = f"its {micro_batch_size} is the base{recomputed}"
        translation.notes.append(f"explored in place of the file's values: the micro-batch ({base}){others}")
        for setting, term in ((Setting.ATTENTION, "attention"), (Setting.EXPERTS, "experts")):
            known = sorted(map(str, TRAINERS[self.name].expresses[term]))
            if setting in self.said and self.said[setting] not in known:
                reason = f"'{shortened(self.said[setting])}' is not measured; these are: {', '.join(known)}"
                translation.refuse(self.source(setting), reason)


def translate_side_files(document: Mapping[str, Any], translation: Translation, num_devices: Any) -> None:
    """Set the batch and the training state from the files of `document`; `num_devices` multiplies a device's batch."""
    top = translation.section(document, ())
    devices = num_devices if isinstance(num_devices, int) and num_devices >= 1 else 1
    batch: Batch | None = None
    before: Location | None = None
    for name, read in SIDE_FILES.items():
        if name in document:
            batch = read(top.section(name), devices, batch)
            shards = translation.sources.get(("training", "sharding"))
            if before is not None and shards is not None and shards != before:
                refuse_second_sharding(translation, shards, before)
            before = shards
    for name, other in ((name, other) for name in SIDE_FILES for other in SIDE_FILES if name in document):
        if isinstance(outer := document.get(other), Mapping) and isinstance(outer.get(name), Mapping):
            translation.refuse((other, name), f"is given a second time, after {name}")
