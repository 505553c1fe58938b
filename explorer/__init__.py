"""The search core: the search space, predicted costs, and what to measure next. No torch, no SQL, no web."""
