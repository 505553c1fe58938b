"""The classes of the installed transformers as a target: any causal language model, measured by its parts.

    resolved = resolve(raw, seq_length, settings=BuildSettings(...))     # resolved.py; UnsupportedModelError, config.py
    describe_parts(resolved, ...)                                        # ModelParts, describe.py
    builder = resolved.builder(device, padding="none")                   # PartsBuilder, builder.py
    part = builder.layer(kind, micro_batch_size)                         # LayerPart, layers.py
    outputs = part.forward(); part.backward(outputs); part.clear_gradients()
    shell = builder.shell(micro_batch_size)                              # ShellPart, shell.py
    shell.forward().backward(); shell.clear_gradients()
    model, batch = builder.whole(), builder.batch(micro_batch_size)      # model(**batch, use_cache=False)

A model is the **shell** and one **layer of each kind**. The shell is the real model with its layers stubbed: embedding,
norm, head and loss as the library computes them. A layer is replayed with the arguments that the model gives it.
`self_check.py` compares both with the whole model on a tiny configuration of the same type. A model is refused if
`check.by_parts` is false. `settings.prepare` is called with every model that is built, before its first use.
"""
