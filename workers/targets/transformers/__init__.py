"""The classes of the installed transformers as a target: any causal language model, measured by its parts.

A model is the **shell** and one **layer of each kind**. The shell is the real model with its layers stubbed: embedding,
norm, head and loss as the library computes them. A layer is replayed with the arguments that the model gives it.
`self_check.py` compares both with the whole model on a tiny configuration of the same type. A model is refused if
`check.by_parts` is false. `settings.prepare` is called with every model that is built, before its first use.
"""
