"""Training commands as people have them, which `benchmarks.tuned_commands` tunes: none of them knows bexp."""
