"""Experts that are spread over the ranks of a process group: `experts.ExpertParallel` is the entry."""
