"""The cost of a step: components, parameters, roofline, memory, collectives, and the candidate table."""
