"""The search: which candidate is measured next, and how sure the recommendation is."""
