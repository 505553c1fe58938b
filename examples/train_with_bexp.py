"""Train a model of transformers as `bexp` recommends: `python train_with_bexp.py MODEL TEXT_FILE best.json`.

`bexp best ID --json > best.json` writes the recommendation.
"""

import sys

import bexp


def main(name: str, text_file: str, best: str) -> None:
    """Train `name` on the lines of a text file."""
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

    told = bexp.Recommendation.read(best)
    model = AutoModelForCausalLM.from_pretrained(name, dtype=told.dtype)
    print(bexp.apply(model, told))  # before CUDA starts: the allocator is part of the recommendation

    tokenizer = AutoTokenizer.from_pretrained(name)
    lines = load_dataset("text", data_files=text_file)["train"]
    tokens = sum(tokenizer(lines["text"])["input_ids"], [])
    length = told.seq_length or 1024
    blocks = [tokens[i : i + length] for i in range(0, len(tokens) - length + 1, length)]
    dataset = [{"input_ids": block, "labels": block} for block in blocks]

    arguments = TrainingArguments("out", num_train_epochs=1, **bexp.training_arguments(told))
    Trainer(model, arguments, train_dataset=dataset, callbacks=[bexp.TrainerCallback(told)]).train()


if __name__ == "__main__":
    main(*sys.argv[1:])
