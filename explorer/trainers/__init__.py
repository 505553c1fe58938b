"""Who runs an answer, and what each trainer can express."""
