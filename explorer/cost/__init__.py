"""What a step costs: components, parameters, roofline, memory, collectives, and the candidate table."""
