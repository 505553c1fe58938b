"""The files that people train with: of Axolotl, LLaMA-Factory, TRL and torchtune, one table of keys each."""
