"""Makes what published inputs name: models with random weights, their tokenizers, and texts, below one folder.

    python -m benchmarks.published_models FOLDER [MODEL ...] [--tiny]

All models are made, or those that are named. Each lies where its name on the hub says, so that a command that is
started in the folder finds it there without a hub: `Qwen/Qwen2-0.5B`, `trl-lib/Capybara`. Words of texts are tokens.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.environment import ROOT

CONFIGS = ROOT / "benchmarks" / "published"
DISTIL: dict[str, Any] = {
    "model_type": "roberta",
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "vocab_size": 50265,
    "max_position_embeddings": 514,
    "type_vocab_size": 1,
    "layer_norm_eps": 1e-5,
}
"""DistilRoBERTa."""
QWEN3_4B: dict[str, Any] = {
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_window_layers": 36,
}
"""What Qwen3-4B has other than Qwen3-0.6B."""
QWEN3_2B: dict[str, Any] = {"hidden_size": 2048, "intermediate_size": 6144}
"""What Qwen3-1.7B has other than Qwen3-0.6B."""
TINY: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 12_288,
}
SYLLABLES = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]
WORDS = ["".join(pair) for pair in itertools.product(SYLLABLES, SYLLABLES[::2])]
LLAMA = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}
LLAMA_OTHERS = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>")
QWEN = {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}
MISTRAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
QWEN_OTHERS = ("<|im_start|>", "<|im_end|>")
ROBERTA = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>", "mask_token": "<mask>"}
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n{output}"
)
"""The prompt of Stanford Alpaca without an input."""


@dataclass(frozen=True)
class Model:
    """A model: `file` of CONFIGS with `changes`, the tokens that its tokenizer names, and its chat template.

    A causal one has weights in bfloat16, another one in float32.
    """

    file: str | None
    special: Mapping[str, str]
    others: Sequence[str] = ()
    changes: Mapping[str, Any] = field(default_factory=dict)
    chat: str | None = None
    causal: bool = True

    @property
    def config(self) -> dict[str, Any]:
        """The configuration."""
        of_file = {} if self.file is None else json.loads((CONFIGS / f"{self.file}.json").read_text())
        return {**of_file, **self.changes}


MODELS = {
    "Qwen/Qwen2-0.5B": Model("qwen2.5-0.5b", QWEN, QWEN_OTHERS, chat=CHATML),
    "NousResearch/Llama-3.2-1B": Model("llama-3.2-1b", LLAMA, LLAMA_OTHERS),
    "mistralai/Mistral-7B-v0.1": Model("mistral-7b-6-layers", MISTRAL, changes={"num_hidden_layers": 32}),
    "Qwen/Qwen3-1.7B": Model("qwen3-0.6b", QWEN, QWEN_OTHERS, QWEN3_2B, CHATML),
    "Qwen/Qwen3-4B-Instruct-2507": Model("qwen3-0.6b", QWEN, QWEN_OTHERS, QWEN3_4B, CHATML),
    "distilbert/distilroberta-base": Model(None, ROBERTA, changes=DISTIL, causal=False),
}
ALL_NLI = """\
---
configs:
- config_name: triplet
  data_files:
  - {split: train, path: train.jsonl}
  - {split: dev, path: dev.jsonl}
---
"""


def main() -> None:
    """Make everything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    folder, share, long = options.folder, *((0.05, (400, 420)) if options.tiny else (1.0, (2100, 2200)))
    for name in options.models or MODELS:
        make_model(folder / name, MODELS[name], TINY if options.tiny else {})
    texts = Texts()
    for split, number in ({"train": 3000, "test": 100}).items():
        chats = ({"messages": texts.chat(200, 900)} for _ in range(round(number * share)))
        write(folder / f"trl-lib/Capybara/{split}.jsonl", chats)
    pairs = [texts.pair(20, 450) for _ in range(round(12_000 * share))]
    write(folder / "teknium/GPT4-LLM-Cleaned/train.jsonl", iter(pairs))
    write_lengths(folder, "NousResearch/Llama-3.2-1B", "teknium/GPT4-LLM-Cleaned", pairs)
    for name, number in ({"identity": 91, "alpaca_en_demo": 999}).items():
        write(folder / f"data/{name}.jsonl", (texts.pair(*long) for _ in range(round(number * share))))
    files = {name: {"file_name": f"{name}.jsonl"} for name in ("identity", "alpaca_en_demo")}
    (folder / "data/dataset_info.json").write_text(json.dumps(files))
    all_nli, stsb = folder / "sentence-transformers/all-nli", folder / "sentence-transformers/stsb"
    for split, number in ({"train": 10_000, "dev": 1000}).items():
        write(all_nli / f"{split}.jsonl", (texts.triplet(8, 32) for _ in range(number)))
    (all_nli / "README.md").write_text(ALL_NLI)
    for split in ("train", "validation", "test"):
        scored = ({**texts.triplet(8, 32), "score": texts.random.random()} for _ in range(200))
        named = ({"sentence1": row["anchor"], "sentence2": row["positive"], "score": row["score"]} for row in scored)
        write(stsb / f"{split}.jsonl", named)
    pairs = [texts.pair(20, 450) for _ in range(round(2000 * share))]
    write(folder / "mhenrichsen/alpaca_2k_test/train.jsonl", iter(pairs))
    write_lengths(folder, "mistralai/Mistral-7B-v0.1", "mhenrichsen/alpaca_2k_test", pairs)


def make_model(folder: Path, model: Model, changes: Mapping[str, Any]) -> None:
    """Write a model with random weights, changed so, and a tokenizer with a token for each word."""
    import torch  # noqa: PLC0415 - late, so that --help is quick
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers  # noqa: PLC0415 - likewise
    from transformers import (  # noqa: PLC0415 - likewise
        AutoConfig,
        AutoModel,
        AutoModelForCausalLM,
        PreTrainedTokenizerFast,
    )

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special, config = model.special, {**model.config, **changes}
    named = dict.fromkeys([*special.values(), *model.others])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=12_000, special_tokens=list(named), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([" ".join(["", *WORDS])], trainer)
    if first := special.get("bos_token"):
        ends = [special["eos_token"]] if not model.causal else []
        whole = " ".join([first, "$A", *ends])
        pairs = [(token, tokenizer.token_to_id(token)) for token in (first, *ends)]
        tokenizer.post_processor = processors.TemplateProcessing(single=whole, special_tokens=pairs)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        **special,
        additional_special_tokens=list(model.others),
        model_max_length=config["max_position_embeddings"] - (0 if model.causal else 2),
    )
    fast.chat_template = model.chat
    fast.save_pretrained(folder)
    ids = {f"{name}_id": fast.convert_tokens_to_ids(token) for name, token in special.items() if name != "mask_token"}
    settings = {**config, **ids}
    resolved = AutoConfig.for_model(settings.pop("model_type"), **settings)
    kind = AutoModelForCausalLM if model.causal else AutoModel
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        made = kind.from_config(resolved, dtype=torch.bfloat16 if model.causal else torch.float32)
    made.save_pretrained(folder)


def write_lengths(folder: Path, model: str, dataset: str, pairs: Sequence[Mapping[str, str]]) -> None:
    """Write the number of tokens of each pair in Alpaca's prompt, with the tokens that begin and end it.

    Without the model's tokenizer nothing is written.
    """
    from transformers import AutoTokenizer  # noqa: PLC0415 - late, so that --help is quick

    if not (folder / model).exists():
        return
    prompts = [ALPACA.format(**pair) for pair in pairs]
    lengths = [len(ids) + 1 for ids in AutoTokenizer.from_pretrained(folder / model)(prompts)["input_ids"]]
    (folder / dataset / "lengths.txt").write_text("\n".join(map(str, lengths)))


class Texts:
    """Texts of words drawn at random."""

    def __init__(self) -> None:
        self.random = random.Random(0)  # noqa: S311 - words of made-up texts

    def words(self, fewest: int, most: int) -> str:
        """Return a text of so many words."""
        return " ".join(self.random.choices(WORDS, k=self.random.randint(fewest, most)))

    def chat(self, fewest: int, most: int) -> list[dict[str, str]]:
        """Return a question and its answer, which has so many words."""
        asked, answered = self.words(10, 40), self.words(fewest, most)
        return [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]

    def pair(self, fewest: int, most: int) -> dict[str, str]:
        """Return an instruction with an output of so many words."""
        return {"instruction": self.words(10, 40), "input": "", "output": self.words(fewest, most)}

    def triplet(self, fewest: int, most: int) -> dict[str, str]:
        """Return three texts of so many words."""
        return {name: self.words(fewest, most) for name in ("anchor", "positive", "negative")}


def write(path: Path, rows: Iterator[dict[str, Any]]) -> None:
    """Write rows as lines of JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


if __name__ == "__main__":
    main()
