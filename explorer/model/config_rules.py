"""The rules of a config.json: bounded numbers, short plain texts, and nothing that names code or a place.

The transformers library builds classes from it before anybody can look at them. Only the library knows its keys, so
each value is bounded by the name of its key.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from bexp.explorer.model.base import FieldPath, RuleError
from bexp.explorer.model.model import EXPERT_COUNTS, TOP_KS

MAX_CONFIG_BYTES = 256 * 1024
MAX_CONFIG_DEPTH = 16

MAX_CONFIG_LAYERS = 512
MAX_ITEMS = 4096
"""The most items of a list or a mapping other than labels."""

LONGEST_TEXT = 256
"""The most characters of a key or a text; the longest that a class reads is a pattern of some hundred layers."""

MAX_MODULES = 1 << 20
"""Layers times experts: some classes build each expert of each layer as a module of its own."""
MAX_ADAPTERS = 1 << 12
"""Layers times adapters. Each is some modules, whose construction takes milliseconds; XMOD has 24 x 81."""
MAX_PARAMETERS = 1 << 50
"""More than a hundred times the parameters of any published model, because it bounds a rough product from above."""

LABELS = frozenset({"id2label", "label2id"})
"""Keys of labels. They are texts of any kind, and no causal language model reads them."""
NAME_KEY = "_name_or_path"
"""At the top, the key of the exploration's name, which goes to no library."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """A kind of number: what it counts, and its largest magnitude as an integer and as a real number."""

    name: str
    most: int
    most_real: float


_REAL = 1e38
_VOCABULARY = _Kind("vocabulary", 1 << 22, _REAL)
_TABLE = _Kind("rows", 1 << 25, _REAL)
_VALUE = _Kind("value", 1 << 53, _REAL)
_FACTOR = _Kind("factor", 1 << 16, 1 << 16)
_LAYERS = _Kind("layers", MAX_CONFIG_LAYERS, MAX_CONFIG_LAYERS)
_EXPERTS = _Kind("experts", 1 << 14, 1 << 14)
_ADAPTERS = _Kind("adapters", 1 << 8, 1 << 8)
_TIMES = _Kind("times", 1 << 12, 1 << 12)
_HEADS = _Kind("heads", 1 << 12, 1 << 12)
_COUNT = _Kind("count", 1 << 16, 1 << 16)
_HEAD_WIDTH = _Kind("head width", 1 << 12, _REAL)
_WIDTH = _Kind("width", 1 << 17, _REAL)

_KINDS: tuple[tuple[re.Pattern[str], _Kind], ...] = tuple(
    (re.compile(pattern), kind)
    for pattern, kind in (
        (r".*(ratio|multiplier|expan|factor).*", _FACTOR),
        (r".*(head_?dim|head_size|kv_channels|d_head|dim_head|d_kv|head_v_dim|head_k_dim).*", _HEAD_WIDTH),
        (r"(.*_)?vocab_size", _VOCABULARY),
        (r".*(vocab|codebook_size|position|length|context|window|chunk|label|rate).*", _TABLE),
        (r".*(theta|_base|base_freq(uency)?|temperature|timescale|seed|clip|clipping|floor|_value)", _VALUE),
        (r"(.*_)?(len|n_ctx|tokens?|ids?|idx|idxs|index|indices)(_.*)?", _TABLE),
        (r".*(sizes?|dims?|channels?|width|rank|kernel|units|embe?d|inner).*", _WIDTH),
        (r"(.*_)?(iters?|iterations|cycles|steps?|loops|passes|hash(es)?|functions|parts)", _TIMES),
        (r"(.*_)?(layers?|blocks|depths?|stages|repeats)(_.*)?|attention_types", _LAYERS),
        (r"(.*_)?experts?(_.*)?", _EXPERTS),
        (r"languages", _ADAPTERS),
        (r"(.*_)?heads?(_.*)?", _HEADS),
        (r"(num|n)_.*", _COUNT),
    )
)
"""The first pattern that matches a key, in lower case, gives the kind of its numbers; all others are widths.

The length of a list is such a number, too: a class may take a list with an item for each layer in place of a number.
"""

_KEY = re.compile(r"(?!__)[A-Za-z0-9_][A-Za-z0-9_.-]*")
_PLAIN = re.compile(r"(?!.*\.[*+])[A-Za-z0-9_ .,+*|#=-]*")
"""A path or an address needs other characters. `.*` is excluded, because some libraries read texts as expressions."""
_DTYPE = re.compile(r"auto|half|float|double|(fp|bf|float|bfloat|u?int)\d+(_?e\d+m\d+(fn|fnuz)?)?")
_CODE_KEYS = ("auto_map", "trust_remote_code")
_OF_CODE = re.compile(
    r"auto_map|trust_remote_code|custom_pipelines|kernel_config|use_kernels|(use_(timm|pretrained)_)?backbone"
    r"|_?(attn|experts)_implementation(_internal)?|attribute_map|sub_configs"
)
"""Keys that choose the code which a library runs, have it fetch something, or change the meaning of another key."""
_OF_PLACE = re.compile(r"(.*_)?(name_or_path|path|repo(sitory)?(_id)?|revision|checkpoint|url|file|commit_hash)")
"""Keys whose texts name a place."""

TOO_LONG = f"longer than {LONGEST_TEXT} characters"
CODE = "code that comes with a model is never run; remove this key"
NAMED = "names code, a repository or a path, and nothing is fetched; remove this key"
PLAIN = "must be text of letters, digits, spaces and _.,+*|#=- alone, without '.*' and '.+'"


def check_hugging_face_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return `config` if all of its values are acceptable. The meaning of its keys is left to the library.

    Raises RuleError if `config` has no `model_type`, is larger than 256 KiB as JSON, is nested deeper than 16
    levels, asks for code from elsewhere at any level, or holds a value beyond its bound.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise RuleError("must name the kind of model as text, such as llama", "model_type")
    check_size(config)
    numbers = _Numbers()
    for path, reason in _faults(config, (), numbers):
        raise RuleError(reason, path)
    numbers.check_products()
    for path, part in (((), config), (("text_config",), config.get("text_config"))):
        if isinstance(part, Mapping):
            _check_routes(part, path)
    return config


def _check_routes(part: Mapping[str, Any], path: FieldPath) -> None:
    """Raise RuleError if a token would go to more experts than there are, or to none."""
    most = max((part[key] for key in EXPERT_COUNTS if type(part.get(key)) is int), default=0)
    for key in TOP_KS:
        if most > 1 and type(part.get(key)) is int and not 1 <= part[key] <= most:
            raise RuleError(f"must be from 1 to {most}, the number of experts", (*path, key))


def check_size(config: Mapping[str, Any]) -> None:
    """Raise RuleError if `config` is larger than 256 KiB as JSON, or nested deeper than 16 levels."""
    if _measure(config, ()) > MAX_CONFIG_BYTES:
        raise RuleError(f"the configuration is larger than {MAX_CONFIG_BYTES // 1024} KiB")


def cleaned(config: Mapping[str, Any], left_out: Callable[[FieldPath, str], None]) -> dict[str, Any]:
    """Return `config` without long texts and names of code or of a place; call `left_out` with each place and reason.

    Published files have such values, which no library needs. `trust_remote_code` stays, because it asks for code.
    """

    def clean(value: Any, path: FieldPath) -> Any:
        if isinstance(value, Mapping):
            return {key: clean(inner, (*path, key)) for key, inner in value.items() if is_kept(key, inner, path)}
        if isinstance(value, list | tuple):
            return [clean(inner, path) for inner in value if is_kept("", inner, path)]
        return value

    def is_kept(key: str, value: Any, path: FieldPath) -> bool:
        reason = None if _is_labels(key, path) or key == "trust_remote_code" else _text_fault(key, value, path)
        if reason is not None:
            left_out((*path, key) if key else path, reason)
        return reason is None

    kept: dict[str, Any] = clean({key: value for key, value in config.items() if key not in LABELS}, ())
    return {key: kept.get(key, value) for key, value in config.items() if key in kept or key in LABELS}


def _faults(value: Any, path: FieldPath, numbers: _Numbers) -> Iterator[tuple[FieldPath, str]]:
    """Yield what is not acceptable below `path`, and note its numbers."""
    is_named = isinstance(value, Mapping)
    if not is_named and not isinstance(value, list | tuple):
        return
    most = MAX_ITEMS if is_named else min(MAX_ITEMS, _kind_of(_key_of(path)).most)
    if len(value) > most:
        yield path, f"has {len(value):,} items; at most {most:,} are allowed"
        return
    if not is_named:
        numbers.take(path, len(value))
    for key, inner in value.items() if is_named else enumerate(value):
        at = (*path, str(key))
        if _is_labels(key, path):
            continue
        reason = _text_fault(str(key) if is_named else "", inner, path)
        if reason is None and isinstance(inner, str) and _key_of(at).endswith("dtype") and not _DTYPE.fullmatch(inner):
            reason = f"must name a number format, such as bfloat16, not {inner!r:.40}"
        if reason is None and isinstance(inner, int | float) and not isinstance(inner, bool):
            reason = numbers.take(at, inner)
        if reason is not None:
            yield at, reason
        yield from _faults(inner, at, numbers)


def _is_labels(key: object, path: FieldPath) -> bool:
    return not path and key in LABELS


def _text_fault(key: str, value: Any, path: FieldPath) -> str | None:
    """Return the fault of `value` as a text or a name, or of its key in the mapping at `path`; None without one."""
    text = value if isinstance(value, str) else ""
    if max(len(key), len(text)) > LONGEST_TEXT:
        return TOO_LONG
    if key and not _KEY.fullmatch(key):
        return "has a key that is no plain name"
    if key == NAME_KEY and not path:
        return None
    if value and _OF_CODE.fullmatch(key):
        return CODE if key in _CODE_KEYS else NAMED
    if value and not isinstance(value, int | float) and _OF_PLACE.fullmatch(key):
        return NAMED
    return None if _PLAIN.fullmatch(text) else f"{PLAIN}, not {text!r:.40}"


def _key_of(path: FieldPath) -> str:
    """Return the last name of a path, which the items of a list share."""
    return next((part for part in reversed(path) if not part.isdecimal()), "")


@lru_cache(1024)
def _kind_of(key: str) -> _Kind:
    return next((kind for pattern, kind in _KINDS if pattern.fullmatch(key.lower())), _WIDTH)


class _Numbers:
    """The largest numbers of a configuration, by kind, and their products."""

    def __init__(self) -> None:
        self._largest: defaultdict[_Kind, list[tuple[int, FieldPath]]] = defaultdict(list)

    def take(self, path: FieldPath, value: float) -> str | None:
        """Return why a number is out of bounds; else count it for the products and return None."""
        kind = _kind_of(_key_of(path))
        most = kind.most if isinstance(value, int) else kind.most_real
        if not abs(value) <= most:  # nor is NaN
            return f"must be a number from {-most:,.15g} to {most:,.15g}"
        if isinstance(value, int) or (math.isfinite(value) and most == kind.most):
            known = self._largest[kind]
            known.append((math.ceil(value), path))
            known.sort(reverse=True)
            del known[2:]
        return None

    def check_products(self) -> None:
        """Raise RuleError if a model of these numbers could have more modules or parameters than any real model."""
        layers, experts, heads, head = (self._first(kind) for kind in (_LAYERS, _EXPERTS, _HEADS, _HEAD_WIDTH))
        modules = layers[0] * experts[0]
        for kind, most in ((_EXPERTS, MAX_MODULES), (_ADAPTERS, MAX_ADAPTERS)):
            each = self._first(kind)
            if layers[0] * each[0] > most:
                message = f"{layers[0]:,} layers of {each[0]:,} {kind.name}: at most {most:,} in all are allowed"
                raise RuleError(message, *_paths(layers, each))
        widths = [*self._largest[_WIDTH], (heads[0] * head[0], head[1]), (1, ()), (1, ())]
        first, second = sorted(widths, reverse=True)[:2]
        parameters = modules * first[0] * second[0]
        if parameters > MAX_PARAMETERS:
            message = (
                f"a model of {layers[0]:,} layers, {experts[0]:,} experts and widths of {first[0]:,} and {second[0]:,} "
                f"could have {parameters:.1e} parameters; at most {MAX_PARAMETERS:.1e} are allowed"
            )
            raise RuleError(message, *_paths(first, second, layers, experts))

    def _first(self, kind: _Kind) -> tuple[int, FieldPath]:
        return max([*self._largest[kind], (1, ())])


def _paths(*numbers: tuple[int, FieldPath]) -> list[FieldPath]:
    return [path for _, path in numbers if path]


def _measure(value: Any, path: FieldPath) -> int:
    """Return a lower bound of the size of `value` as JSON, in bytes, and check how deep it is nested."""
    if len(path) > MAX_CONFIG_DEPTH:
        raise RuleError(f"the configuration is nested deeper than {MAX_CONFIG_DEPTH} levels", path[:1])
    if isinstance(value, Mapping):
        return 2 + sum(len(str(key)) + 4 + _measure(inner, (*path, str(key))) for key, inner in value.items())
    if isinstance(value, list | tuple):
        return 2 + sum(1 + _measure(inner, (*path, str(index))) for index, inner in enumerate(value))
    return len(str(value).encode("utf-8", "surrogatepass"))
