"""Train a transformers model as `bexp` recommends: `python train_with_bexp.py MODEL TEXT_FILE best.json`.

MODEL is a name on the Hugging Face hub, or a folder with weights and a tokenizer. `bexp best ID --json > best.json`
writes the recommendation.
"""

import argparse
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

import bexp


def main(name: str, text_file: str, best: str) -> None:
    """Train `name` on a text file."""
    told = bexp.RecommendedSetup.read(best)
    model = AutoModelForCausalLM.from_pretrained(name, dtype=told.load_dtype)
    # This comes before CUDA starts, because the allocator is part of the recommendation.
    print(bexp.apply(model, told))  # noqa: T201 - the script speaks to who runs it

    tokenizer = AutoTokenizer.from_pretrained(name)
    tokens = tokenizer(Path(text_file).read_text(encoding="utf-8"))["input_ids"]
    length = told.seq_length or 1024
    blocks = [tokens[i : i + length] for i in range(0, len(tokens) - length + 1, length)]
    dataset = [{"input_ids": block, "labels": block} for block in blocks]

    arguments = TrainingArguments(**bexp.training_arguments(told, output_dir="out", num_train_epochs=1))
    callback = bexp.TrainerCallback(told)
    Trainer(model, arguments, train_dataset=dataset, callbacks=[callback]).train()
    print(callback.comparison())  # noqa: T201 - the script speaks to who runs it


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for argument in ("MODEL", "TEXT_FILE", "BEST"):
        parser.add_argument(argument)
    given = parser.parse_args()
    main(given.MODEL, given.TEXT_FILE, given.BEST)
