"""The trainers that run an answer, and what each can express."""
