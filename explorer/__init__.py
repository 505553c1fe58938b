"""The search core: what may vary, what it is predicted to cost, what to measure next. No torch, no SQL, no web."""
