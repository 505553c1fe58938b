"""A Gaussian process over components, and the error of composed steps."""
