"""Expert back ends that are kept to compare with; in the search space only when named."""
